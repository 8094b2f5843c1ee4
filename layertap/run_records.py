"""The runs that worked on a root: what each was asked to do, so that it can be asked again later."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from layertap.errors import CatalogError
from layertap.records import known_fields, to_json
from layertap.store import Store
from layertap.told import read_told

FOLDER = "runs"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: `runs/<run_id>.json`."""

    run_id: str
    """Random; the run's lanes are told to stop under it."""

    plan_id: str | None
    """None where there was nothing to compute."""

    started_at: str
    """UTC, ISO 8601."""

    started_by: str
    """Who started it, such as a flow run's id; empty for nobody in particular."""

    request: dict[str, Any]
    """What it was asked to do, in the words of who started it; no secrets."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; fields of newer minor formats are ignored."""
        return cls(**known_fields(cls, values))


class RunRecords:
    """The records of one root."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, record: RunRecord) -> None:
        """Write a record."""
        self.store.put(f"{FOLDER}/{record.run_id}.json", to_json(asdict(record)), durable=True)

    def all(self) -> list[RunRecord]:
        """Every run, oldest first; a damaged record is left out with a warning."""
        paths = [info.path for info in self.store.list(FOLDER) if info.path.endswith(".json")]
        records = filter(None, (read_told(self.store, path, RunRecord.from_dict) for path in paths))
        return sorted(records, key=lambda record: (record.started_at, record.run_id))

    def latest(self) -> RunRecord:
        """The newest run that says what it was asked to do.

        Raises:
            CatalogError: no run has left a record here.
        """
        told = [record for record in self.all() if record.request]
        if not told:
            raise CatalogError(
                f"no run has left its settings in {self.store.uri}: start an extraction on it once"
            )
        return told[-1]
