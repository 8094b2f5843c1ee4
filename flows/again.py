"""Runs that take up what an earlier one was asked to do: finish it, or do it on what its dataset became."""

import shlex
import time
from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import OPTIONS
from flows.extract import extract_to_end
from flows.parameters import Again, Extraction, Reextraction, Retry
from flows.turns import wait_for_turn
from layertap.dataset import TokenDataset
from layertap.dataset_files import FileState
from layertap.errors import DatasetError
from layertap.run_records import RunRecords
from layertap.versions import Version, Versions
from tasks.storage import dataset_files, local_dataset, open_store

POLL_S = 5.0


@flow(name="retry_failed_shards", flow_run_name="{retry.run_name}", **OPTIONS)
def retry_failed_shards(retry: Retry) -> State[Any]:
    """Finish what the last run on a root left undone, whether or not that run is still known to Prefect.

    The run's own settings are taken from the root. Only what is missing is computed.
    """
    return extract_to_end(_last(retry), shards=retry.shards)


@flow(name="reextract_when_changed", flow_run_name="{reextraction.run_name}", **OPTIONS)
def reextract_when_changed(reextraction: Reextraction) -> State[Any]:
    """Bring a root up to its dataset, if that has changed since the newest version was published.

    It looks at the dataset, not at what woke it: an event or a schedule that comes twice, late or not at all
    costs nothing. It goes on until the dataset is what it has just extracted. While another run looks after
    the root it waits to look once more; if one waits already, it is Skipped. Rows that a GPU had no memory
    for are none of its business: they may never fit, and it may come every hour.
    """
    if not wait_for_turn(reextraction):
        return Completed(name="Skipped", message="a run that waits for its turn will look at the dataset")
    extraction = _last(reextraction)
    if reextraction.dataset:
        extraction = extraction.model_copy(update={"dataset": reextraction.dataset})
    end: State[Any] | None = None
    while (version := _up_to_date(extraction)) is None:
        seen = _wait_until_still(extraction, reextraction.still_s)
        try:
            end = extract_to_end(extraction)
            if end.is_cancelled():
                return end
        except DatasetError as error:
            if _files(extraction) == seen:
                raise
            get_run_logger().warning("the dataset changed meanwhile, starting over: %s", error)
    return end or _skipped(extraction, version)


def _last(again: Again) -> Extraction:
    """What the last run on the root was asked to do, with another number of lanes unless that is 0.

    The root may have been moved since, and the storage block may have got another name.
    """
    asked: Mapping[str, Any] = RunRecords(open_store(again.storage, again.root)).latest().request
    changed = {
        "root": again.root,
        "storage": again.storage,
        "num_lanes": again.num_lanes or asked["num_lanes"],
    }
    return Extraction.model_validate({**asked, **changed})


def _up_to_date(extraction: Extraction) -> Version | None:
    """The newest version, if it is complete and of the dataset as it can be read now."""
    newest = Versions(open_store(extraction.storage, extraction.root)).latest(complete=False)
    if newest is None or not newest.complete:
        return None
    settings = extraction.settings()
    try:
        path = local_dataset(extraction.storage, settings.dataset)
        dataset = TokenDataset.open(path, split=settings.split, columns=settings.columns)
        return newest if dataset.fingerprint == newest.dataset_fingerprint else None
    except DatasetError as error:  # if its writer is through, extracting it says the same
        get_run_logger().info("the dataset can't be read: %s", error)
        return None


def _skipped(extraction: Extraction, version: Version) -> State[Any]:
    message = "the dataset has not changed"
    if version.num_without_memory:
        uri = open_store(extraction.storage, extraction.root).uri
        message += (
            f"; {version.num_without_memory:,} rows of version {version.number} were refused because a GPU "
            f"had no memory for them: `layertap retry {shlex.quote(uri)}` tries them again"
        )
    return Completed(name="Skipped", message=message)


def _files(extraction: Extraction) -> tuple[FileState, ...]:
    """State of the dataset's files; none while its writer has it out of the way."""
    try:
        return dataset_files(extraction.storage, extraction.dataset)
    except (DatasetError, FileNotFoundError):
        return ()


def _wait_until_still(extraction: Extraction, still_s: float) -> tuple[FileState, ...]:
    """Wait until the dataset's files have been the same for a while: its writer may not be through."""
    seen, since = _files(extraction), time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(min(POLL_S, still_s))
        if (now := _files(extraction)) != seen:
            seen, since = now, time.monotonic()
    return seen
