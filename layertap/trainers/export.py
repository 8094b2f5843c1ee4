"""Write the files of a trainer: said beforehand, resumable, and each whole or not there.

A file is written under another name and renamed when it is whole, so that a file with its name counts. What
the trainer needs beside (a manifest, the target's files) comes last.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from layertap.errors import InputError
from layertap.folder import replacing
from layertap.target_files import TargetFiles
from layertap.trainers.layouts import Layout, OutFile, write_json
from layertap.trainers.rows import TrainerRows

RECORD = "export.json"
"""In an export's folder: what it is an export of."""

THREADS = 8

DISK_MARGIN = 1.01


@dataclass(frozen=True, kw_only=True)
class Export:
    """An export that has been planned and not yet written."""

    rows: TrainerRows
    layout: Layout
    folder: Path
    settings: dict[str, Any]
    """What tells this export from others into the same folder."""

    files: list[OutFile]
    target_bytes: int
    """Of the copy of the target's files."""

    missing: list[OutFile]
    """Files that aren't there yet."""

    @classmethod
    def plan(cls, rows: TrainerRows, layout: Layout, folder: Path, *, settings: dict[str, Any]) -> "Export":
        """Name all files and look which are there.

        Raises:
            CatalogError: the root lacks what the trainer needs.
            InputError: the folder holds something else, or its disk is too small.
        """
        version = rows.states.version
        settings = {
            **settings,
            "spec_fingerprint": version.spec_fingerprint,
            "version": version.number,
            "content": version.content,
        }
        _refuse_other(folder, settings)
        files = list(layout.files(rows))
        export = cls(
            rows=rows,
            layout=layout,
            folder=folder,
            settings=settings,
            files=files,
            target_bytes=sum(file["size"] for file in TargetFiles(rows.states.store).record.files.values()),
            missing=[file for file in files if not (folder / file.name).exists()],
        )
        export._refuse_small_disk()
        return export

    @property
    def num_bytes(self) -> int:
        """What the whole export takes, about."""
        return sum(file.nbytes for file in self.files) + self.target_bytes

    def _refuse_small_disk(self) -> None:
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        needed = int((sum(file.nbytes for file in self.missing) + self.target_bytes) * DISK_MARGIN)
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise InputError(
                f"{needed:,} bytes are to be written to {self.folder}, whose disk has {free:,} free: export "
                "to another disk, or read the root directly, which needs none"
            )

    def run(self, on_written: Callable[[OutFile], None] = lambda _: None) -> None:
        """Write what is missing.

        Args:
            on_written: called with each file that is finished.

        Raises:
            IntegrityError, StoreError: a row can't be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RECORD, self.settings)
        with ThreadPoolExecutor(THREADS) as pool:
            for file in _in_order(pool, self._write, self.missing):
                on_written(file)
        TargetFiles(self.rows.states.store).copy_to(self.folder / "target")
        self.layout.finish(self.rows, self.folder)

    def _write(self, file: OutFile) -> OutFile:
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            self.layout.write(self.rows, file, part)
        return file


def _refuse_other(folder: Path, settings: dict[str, Any]) -> None:
    """A folder is new, empty, or of the same export."""
    record = folder / RECORD
    if not record.exists():
        begun = folder / f"{RECORD}.part"  # all that a kill at the first write leaves
        if folder.exists() and any(path != begun for path in folder.iterdir()):
            raise InputError(f"{folder} isn't empty and holds no export: name another folder")
        return
    there = json.loads(record.read_text())
    differences = [
        f"{name} {there.get(name)!r} there, {settings[name]!r} asked"
        for name in settings
        if there.get(name) != settings[name]
    ]
    if differences:
        raise InputError(
            f"{folder} holds another export ({'; '.join(differences)}): name another folder, or remove it"
        )


def _in_order(
    pool: ThreadPoolExecutor, write: Callable[[OutFile], OutFile], files: Iterable[OutFile]
) -> Iterator[OutFile]:
    """Write files, a few at once."""
    waiting, pending = iter(files), list[Future[OutFile]]()
    pending += [pool.submit(write, file) for file in islice(waiting, THREADS)]
    while pending:
        yield pending.pop(0).result()
        pending += [pool.submit(write, file) for file in islice(waiting, 1)]
