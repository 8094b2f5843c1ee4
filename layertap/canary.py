"""A root's canary: states of a few fixed tokens by its first lane, which all others must compute too."""

import json
from collections.abc import Mapping
from contextlib import suppress

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from layertap.errors import AlreadyExistsError, IntegrityError
from layertap.store import Store, checksum

CANARY = "target/canary.safetensors"


def share_canary(store: Store, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The canary that a root has, which is this one if it had none.

    Raises:
        IntegrityError: it was damaged.
    """
    with suppress(AlreadyExistsError):
        states = dict(mine)
        store.create(CANARY, save(states, {"checksum": _checksum(save(states))}))
    return read_canary(store)


def read_canary(store: Store) -> dict[str, Tensor]:
    """The canary that a root has, by name of the state; fetched again once if it arrives damaged.

    Raises:
        NotFoundError: no lane has begun.
        IntegrityError: it was damaged; says the way out.
    """
    try:
        return _states(store.get(CANARY))
    except (SafetensorError, ValueError):
        with suppress(SafetensorError, ValueError):
            return _states(store.get(CANARY))
    raise IntegrityError(f"{store.uri}/{CANARY} hasn't the bytes that were written. {way_out(store.uri)}")


def way_out(uri: str) -> str:
    """How a root comes by a sound canary again."""
    return f"remove {uri}/{CANARY}: the next lane that starts writes it anew"


def _states(data: bytes) -> dict[str, Tensor]:
    states = load(data)
    said = _header(data).get("__metadata__", {}).get("checksum")
    if said not in (None, _checksum(data)):  # None: by an older layertap
        raise ValueError(f"{said} was written")
    return states


def _checksum(data: bytes) -> str:
    """Of a safetensors file's tensors: their names, dtypes, shapes and bytes."""
    header = _header(data)
    header.pop("__metadata__", None)
    states = data[8 + int.from_bytes(data[:8], "little") :]
    return checksum(json.dumps(header, sort_keys=True).encode() + states)


def _header(data: bytes) -> dict[str, dict[str, str]]:
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header
