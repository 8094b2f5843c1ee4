"""What users may rely on, and what importing it costs."""

import subprocess
import sys

import layertap


def test_exports_exactly_the_public_names():
    assert sorted(layertap.__all__) == ["HiddenStates", "LayertapError", "__version__"]
    for name in layertap.__all__:
        assert getattr(layertap, name) is not None


def test_every_error_is_a_layertap_error():
    import layertap.errors as errors

    raised = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, layertap.LayertapError) for e in raised)
    missing = [e.__name__ for e in raised if e.__name__ not in (errors.__doc__ or "")]
    assert not missing, f"not in the tree of layertap.errors: {missing}"


def test_import_is_light():
    heavy = ["torch", "transformers", "boto3", "pyarrow", "obstore", "prefect"]
    code = f"import sys, layertap; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_library_does_not_need_prefect():
    plugs_into = {"triton", "modelopt", "specforge", "speculators", "hs_connectors"}
    code = (
        "import sys; sys.modules['prefect'] = None; sys.modules['prefect_aws'] = None\n"
        "import importlib, pkgutil, layertap\n"
        "for module in pkgutil.walk_packages(layertap.__path__, 'layertap.'):\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        if error.name.partition('.')[0] not in {plugs_into}: raise\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
