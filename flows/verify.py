"""Whether a root still holds what was written to it."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import OPTIONS
from flows.parameters import Verification
from layertap.verify import verify_root
from tasks.artifacts import VERIFICATION, only_shown
from tasks.storage import open_store


@flow(name="verify", **OPTIONS)
def verify(verification: Verification) -> State[Any]:
    """Read a root back: records, the target's files, rows; fails with what isn't as it was written."""
    report = verify_root(
        open_store(verification.storage, verification.root),
        num_rows=verification.num_rows or None,
        target=verification.target or None,
        revision=verification.revision or None,
        num_recomputed=verification.num_recomputed,
    )
    with only_shown():
        create_markdown_artifact(report.markdown(), key=VERIFICATION, description="What was read back")
    report.check()
    return Completed(message=str(report))
