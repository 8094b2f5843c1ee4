"""The layout that a name on the command line means."""

from collections.abc import Callable, Mapping
from typing import Any

from layertap.errors import InputError
from layertap.trainers.automodel import AutomodelFiles
from layertap.trainers.deepspec import DeepSpecFiles
from layertap.trainers.layouts import Layout, ModelOptFiles, SpecForgeFiles, SpeculatorsFiles

LAYOUTS: Mapping[str, tuple[Callable[..., Layout], Mapping[str, str]]] = {
    "speculators": (SpeculatorsFiles, {"tokens_only": "tokens_only"}),
    "specforge": (SpecForgeFiles, {"algorithm": "algorithm", "seq_length": "max_length"}),
    "modelopt": (ModelOptFiles, {}),
    "automodel": (AutomodelFiles, {"seq_length": "seq_length", "target_name": "target_model"}),
    "deepspec": (DeepSpecFiles, {"target_name": "target_model"}),
}
"""Trainer -> its layout, and its options with the names of their arguments."""

OPTIONAL = {("speculators", "tokens_only"), ("specforge", "seq_length")}


def layout_for(trainer: str, **options: Any) -> Layout:
    """A trainer's layout.

    Args:
        trainer: one of `LAYOUTS`.
        options: by name; None and False mean: not given.

    Raises:
        InputError: an option that the trainer needs is not given, or one that it doesn't know is.
    """
    make, known = LAYOUTS[trainer]
    given = {name: value for name, value in options.items() if value not in (None, False)}
    for name in given.keys() - known.keys():
        raise InputError(f"{_flag(name)} means nothing to {trainer}: leave it out")
    for name in known.keys() - given.keys():
        if (trainer, name) not in OPTIONAL:
            raise InputError(f"{trainer} needs {_flag(name)}; see layertap export --help")
    return make(**{known[name]: value for name, value in given.items()})


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
