"""How fast lanes are and what holds them up, in Prefect's UI: a lane's own artifact, and the run's picture.

An image artifact holds an address. The picture's is a `data:` URI of its bytes: an address in the store would
need a store that browsers reach, and would expire.
"""

import base64
import logging
import time
from concurrent.futures import Future
from contextvars import copy_context

from prefect.artifacts import ImageArtifact, MarkdownArtifact

from layertap.background import in_background
from layertap.errors import StoreError
from layertap.lane_record import LaneRecord, lane_records
from layertap.plot import speed_path, speed_png
from layertap.store import Store
from tasks.artifacts import InPlace, only_shown

LANE, SPEED = "layertap-lane", "layertap-speed"
"""Keys of the artifacts."""

DRAW_EVERY_S = 60.0

log = logging.getLogger(__name__)


class LaneBoard:
    """A lane's artifact, updated in place.

    In the background: a server whose database is locked answers after a minute, and a lane has better to do.
    """

    def __init__(self) -> None:
        self._artifact = InPlace()
        self._shown: Future[None] = Future()
        self._shown.set_result(None)

    def show(self, record: LaneRecord) -> None:
        """Show what the lane last told of itself, unless the server still hasn't answered the time before."""
        if self._shown.done():
            self._shown.result()
            self._shown = in_background("lane-board", copy_context().run, self._show, record)

    def conclude(self, record: LaneRecord) -> None:
        """Show the lane's last word, and wait until it is shown."""
        self._shown.result()
        self._show(record)

    def _show(self, record: LaneRecord) -> None:
        text, held_up_by = record.markdown(), record.bottleneck
        with only_shown():
            self._artifact.show(MarkdownArtifact(key=LANE, markdown=text, description=held_up_by))


class SpeedBoard:
    """The run's picture, drawn once a minute, kept in the root and shown."""

    def __init__(self, store: Store, plan_id: str) -> None:
        self._store, self._plan_id = store, plan_id
        self._artifact = InPlace()
        self._due = time.monotonic() + DRAW_EVERY_S

    def show(self, *, last: bool = False) -> None:
        """Draw the picture if it is time; a store or a server that is away puts it off."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + DRAW_EVERY_S
        try:
            records = lane_records(self._store, self._plan_id)
            if not records:
                return
            picture = speed_png(records)
            self._store.put(speed_path(self._plan_id), picture)
        except StoreError as error:
            log.warning("the picture of the run's speed is put off: %s", error)
            return
        self._show(picture, "; ".join(f"{record.lane} is {record.bottleneck}" for record in records[-3:]))

    def _show(self, picture: bytes, description: str) -> None:
        uri = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        with only_shown():
            self._artifact.show(ImageArtifact(key=SPEED, image_url=uri, description=description))
