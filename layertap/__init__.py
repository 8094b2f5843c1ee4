"""layertap taps chosen layers of a language model over a tokenised dataset and stores the hidden states.

Trainers need this module only: `layertap.HiddenStates(uri)` reads what an extraction stored, and every error
raised on purpose is a `layertap.LayertapError` (the whole tree: `layertap.errors`).
"""

from typing import TYPE_CHECKING, Any

from layertap.errors import LayertapError

if TYPE_CHECKING:
    from layertap.reader import HiddenStates

__all__ = ["HiddenStates", "LayertapError", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the reader, and with it torch, when it is asked for."""
    if name == "HiddenStates":
        from layertap.reader import HiddenStates

        return HiddenStates
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
