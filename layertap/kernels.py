"""Which kernels transformers runs a model with: those of a package such as `fla`, or its own slow code.

The choice falls once, when the model's module is imported: by what is installed, not by what device there is.
Compiling the layers puts an operator around the one kernel and replaces the other, see `layertap.compiled`.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layertap import attention, delta_net
from layertap.compiled import CONVOLUTION, DELTA_RULE, delta_rules, fla_convolution, is_opened_up
from layertap.errors import TargetError

OWN_CODE = "transformers (reference)"
FLA_CONVOLUTION, FLA_DELTA_RULE = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"

FOR_DECODING = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule")
"""Functions that a pass over whole rows never calls."""

LINEAR_ATTENTION = "linear_attn"
"""What transformers calls the Gated DeltaNet block of a layer that has one."""

ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the rotation of query and key; there is a choice once layers are fused."""

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""

NO_MEMORY = ("Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How those say it that ask the driver for memory of their own."""


def keep_gpu_kernels_out() -> None:
    """Have transformers take its own code instead of `fla`'s kernels, which die without a GPU.

    No use after the model's module was imported.
    """
    if "fla" not in sys.modules and importlib.util.find_spec("fla"):
        sys.modules["fla"] = None  # type: ignore[assignment]


def kernels_in_use(layers: nn.ModuleList) -> dict[str, str]:
    """Functions of the layers' code for which there was a choice, and the module that was chosen."""
    chosen: dict[str, str] = {}
    for module in {sys.modules[type(layer).__module__] for layer in layers.modules()}:
        functions: dict[str, Callable[..., Any]] = dict(inspect.getmembers(module, inspect.isfunction))
        if is_opened_up(module):
            functions[DELTA_RULE] = delta_rules[module.__name__]
            convolution = getattr(module, CONVOLUTION)
            chosen[CONVOLUTION] = (
                FLA_CONVOLUTION if convolution is fla_convolution else convolution.__module__
            )
        for name, function in functions.items():
            implementation = inspect.getclosurevars(function).nonlocals.get("implementation")
            if implementation is not None:
                is_own = implementation.__module__ == module.__name__
                chosen[name] = OWN_CODE if is_own else implementation.__module__
    if any(map(delta_net.is_fused, layers.modules())):
        chosen[CONVOLUTION] = delta_net.__name__
        if next(layers.parameters()).is_cuda:
            chosen[DELTA_RULE] = FLA_DELTA_RULE
    if any(map(attention.is_fused, layers.modules())):
        chosen[ROTARY] = attention.__name__
    return chosen


def refuse_gpu_kernels(layers: nn.ModuleList, device: torch.device) -> None:
    """Refuse kernels that can't run on the device.

    Raises:
        TargetError: the layers are on a CPU and were imported with `fla`'s kernels.
    """
    for name, package in kernels_in_use(layers).items():
        if device.type == "cpu" and package.partition(".")[0] == "fla":
            raise TargetError(
                f"{name} runs on a GPU only ({package}), and the target is on {device}: start with "
                "CUDA_VISIBLE_DEVICES= set to nothing and import no model before layertap, to keep fla out"
            )


def refuse_slow_kernels(layers: nn.ModuleList, device: torch.device) -> None:
    """Refuse to run on a GPU with code that transformers calls correct but much slower.

    Raises:
        TargetError: names the functions and the way out; or the layers have a delta rule under another name.
    """
    if device.type != "cuda":
        return
    chosen = kernels_in_use(layers)
    if DELTA_RULE not in chosen and any(hasattr(layer, LINEAR_ATTENTION) for layer in layers):
        raise TargetError(
            f"it isn't known what computes {type(layers[0]).__name__}'s linear attention: this release of "
            f"transformers has no {DELTA_RULE}. Install one that layertap was tested with, or set "
            "strict_kernels to false"
        )
    slow = sorted(n for n, package in chosen.items() if package == OWN_CODE and n not in FOR_DECODING)
    if slow:
        raise TargetError(
            f"{', '.join(slow)} would run as the slow reference code of transformers: install "
            "flash-linear-attention (and causal-conv1d, where layers aren't compiled) on this host, or set "
            "strict_kernels to false"
        )


def is_context_fatal(error: BaseException) -> bool:
    """Whether the process has lost its GPU with this error: every later call to CUDA fails as well.

    Running out of memory is no such error.
    """
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device has no memory left, said by PyTorch's allocator, the driver, Triton or cuBLAS.

    Triton's OutOfResources is another matter: a kernel wants more shared memory than there is for any batch.
    """
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    )
