"""Streams of rows for training: shuffled, shared out, read ahead, and resumable in mid-epoch.

`layertap.epoch` says which row comes when and who reads it, and why that reads at the store's speed.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from layertap.collate import Row
from layertap.epoch import Batch, EpochSettings, Segment, remaining_batches
from layertap.errors import InputError

if TYPE_CHECKING:
    from layertap.reader import HiddenStates

STATE_FORMAT = 1
"""Of `state_dict`; another one where its fields change, or the order of rows that follows from them."""

Collate = Callable[[Sequence[Row]], Any]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in an epoch: the parts of it that have been read."""

    epoch: int = 0
    segments: tuple[Segment, ...] = ()

    def read_by(self, num_ranks: int, num_workers: int) -> Self:
        """The same place, read on by these ranks and workers."""
        last = self.segments[-1] if self.segments else None
        if last and (last.num_ranks, last.num_workers) == (num_ranks, num_workers):
            return self
        segment = Segment(num_ranks=num_ranks, num_workers=num_workers, num_steps=0)
        earlier = tuple(s for s in self.segments if s.num_steps)
        return replace(self, segments=(*earlier, segment))

    def at_step(self, num_steps: int) -> Self:
        """The place after so many steps of the last part."""
        return replace(self, segments=(*self.segments[:-1], replace(self.segments[-1], num_steps=num_steps)))

    @property
    def num_steps(self) -> int:
        """Steps of the last part."""
        return self.segments[-1].num_steps


class RowStream(IterableDataset[Any]):
    """Rows or batches of `HiddenStates` for training; made by `HiddenStates.stream`.

    Each pass is an epoch: every row once, over all ranks and workers together, in another order each time. No
    row is repeated to even out the ranks and, unless asked, none is left out: where the batches don't divide
    by the ranks, some near the end are halved, so that all ranks take equally many steps. (Only where every
    row is alone in its batch some take one more.)

    Threads read ahead within the process, which is enough for most stores; `loader` spreads the stream over
    DataLoader workers. `state_dict` is the place behind the last batch that was yielded: a stream that loads
    it goes on with the next one, exactly. With other numbers of ranks or workers the rest of the epoch is
    shuffled anew, each row still once; the state must then be of a step that all ranks have taken.

    The workers of a plain DataLoader read each row once as well. There, call `set_epoch` before each epoch;
    the state is known to `loader` and to torchdata's StatefulDataLoader only.
    """

    def __init__(
        self,
        states: "HiddenStates",
        settings: EpochSettings,
        collate: Collate,
        *,
        rank: int,
        num_ranks: int,
        num_threads: int,
    ) -> None:
        if type(num_threads) is not int or num_threads < 1:
            raise InputError(f"num_threads is {num_threads!r}; it must be an integer of at least 1")
        self.states = states
        self.settings = settings
        self.rank = rank
        self.num_ranks = num_ranks
        self._collate = collate
        self._num_threads = num_threads
        self._start = self._at = Position()
        shared: Any = torch.zeros(2, dtype=torch.int64)
        self._shared: Tensor = shared.share_memory_()
        """The epoch, and whether DataLoader workers were the last to read: seen by all processes."""

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next pass, in workers that live on as well.

        Raises:
            InputError: `epoch` is no integer of at least 0.
        """
        if type(epoch) is not int or epoch < 0:
            raise InputError(f"epoch is {epoch!r}; it must be an integer of at least 0")
        self._go_to(Position(epoch=epoch))

    def _go_to(self, position: Position) -> None:
        self._start = self._at = position
        self._shared[0] = position.epoch

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch: from its beginning, or from the state that was loaded."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self._shared[1] = info is not None
        position = self._begin(num_workers)
        batches = self.batches(position)
        steps = range(position.num_steps + worker, len(batches), num_workers)
        for step, batch in zip(steps, self._read([batches[k] for k in steps]), strict=True):
            self._at = position.at_step(step + num_workers - worker)
            yield batch
        if info is None:
            self.set_epoch(position.epoch + 1)

    def _begin(self, num_workers: int) -> Position:
        if int(self._shared[0]) != self._start.epoch:  # set in another process
            self._start = Position(epoch=int(self._shared[0]))
        self._at = self._start.read_by(self.num_ranks, num_workers)
        return self._at

    def batches(self, position: Position) -> list[Batch]:
        """This rank's batches of an epoch, in the order of its steps; those of earlier segments left out."""
        places, segments = self.states.places, position.segments
        everyone = remaining_batches(places, self.settings, epoch=position.epoch, segments=segments)
        return everyone[self.rank :: self.num_ranks]

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch yielded, as JSON values.

        Raises:
            InputError: DataLoader workers read the stream, so that only their loader knows.
        """
        if self._shared[1] and get_worker_info() is None:
            raise InputError(
                "DataLoader workers have read this stream, and only their loader knows how far its user is: "
                "iterate stream.loader(num_workers=…) and ask it for its state_dict()"
            )
        return self._state_at(self._at)

    def _state_at(self, position: Position) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "content": self.states.content,
            "num_rows": len(self.states),
            "settings": self.settings.to_dict(),
            "epoch": position.epoch,
            "segments": [asdict(segment) for segment in position.segments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch at which `state_dict` was called.

        Raises:
            InputError: the state is of another format than this layertap's, of other rows or of a stream with
                other settings; names them.
        """
        if state.get("format") != STATE_FORMAT:
            raise InputError(
                f"the state is of format {state.get('format')!r}, and this layertap goes on from format "
                f"{STATE_FORMAT} alone: load it with the layertap that saved it, or begin an epoch anew with "
                "set_epoch"
            )
        mine = self._state_at(self._start)
        wrong = [
            f"{name}: {mine[name]!r} here, {state.get(name)!r} in the state"
            for name in ("content", "num_rows")
            if mine[name] != state.get(name)
        ]
        wrong += self.settings.differences(state.get("settings", {}))
        if wrong:
            raise InputError(f"the state is of another stream ({'; '.join(wrong)}): open the one it is of")
        segments = tuple(Segment(**segment) for segment in state["segments"])
        self._go_to(Position(epoch=state["epoch"], segments=segments))

    def loader(self, num_workers: int, **arguments: Any) -> "StreamLoader":
        """A DataLoader whose worker processes read the stream.

        Args:
            num_workers: of this rank; 0 reads in this process.
            arguments: further ones of DataLoader, such as `pin_memory` and `multiprocessing_context`.
        """
        return StreamLoader(self, num_workers, **arguments)

    def _read(self, batches: list[Batch]) -> Iterator[Any]:
        """The batches' contents; while one window is yielded, the next one is read."""
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="layertap-read")
        windows = self._windows(batches)
        try:
            ready = deque(self._submit(window, pool) for window in islice(windows, 2))
            while ready:
                window = ready.popleft()
                while window:
                    yield window.popleft()()
                ready.extend(self._submit(window, pool) for window in islice(windows, 1))
        finally:
            pool.shutdown(cancel_futures=True)

    def _windows(self, batches: list[Batch]) -> Iterator[list[Batch]]:
        """Runs of batches that are read together, of one window as far as they are many."""
        limit, window, size = self.settings.window_bytes, list[Batch](), 0
        for batch in batches:
            if window and size >= (limit // 4 if batch.window != window[-1].window else limit * 3 // 2):
                yield window
                window, size = [], 0
            window.append(batch)
            size += int(self.states.places.nbytes[batch.rows].sum())
        if window:
            yield window

    def _submit(self, window: list[Batch], pool: ThreadPoolExecutor) -> deque[Callable[[], Any]]:
        """Start to read a window; returns what waits for each of its batches."""
        reads = iter(self.states.submit([int(i) for batch in window for i in batch.rows], pool))
        rows = [list(islice(reads, len(batch.rows))) for batch in window]
        if not self.settings.is_batched:
            return deque(row for (row,) in rows)
        return deque(pool.submit(self._collated, batch).result for batch in rows)

    def _collated(self, rows: list[Callable[[], Row]]) -> Any:
        return self._collate([read() for read in rows])


class StreamLoader(DataLoader[Any]):
    """A DataLoader over a RowStream that knows how many batches its user has had; made by `RowStream.loader`.

    Raises:
        InputError: `persistent_workers` were asked for: they can't be told from where to go on.
    """

    dataset: RowStream

    def __init__(self, stream: RowStream, num_workers: int, **arguments: Any) -> None:
        if arguments.get("persistent_workers"):
            raise InputError("persistent_workers keep their place in the stream: leave them off")
        super().__init__(stream, batch_size=None, num_workers=num_workers, **arguments)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The rest of the epoch, as of the stream itself."""
        if not self.num_workers:
            yield from super().__iter__()
            return
        position = self.dataset._begin(self.num_workers)
        for step, batch in enumerate(super().__iter__(), position.num_steps):
            self.dataset._at = position.at_step(step + 1)
            yield batch
        self.dataset.set_epoch(position.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch yielded, as `RowStream.state_dict`."""
        return self.dataset._state_at(self.dataset._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `RowStream.load_state_dict`."""
        self.dataset.load_state_dict(state)


def rank_of_process(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    """Rank and number of ranks, by default those of `torch.distributed`; alone where it isn't in use.

    Raises:
        InputError: only one of them is given, they are out of range, or several processes were started but
            `torch.distributed` doesn't know of them yet.
    """
    if (rank is None) != (num_ranks is None):
        raise InputError(f"rank is {rank} and num_ranks {num_ranks}: give both, or neither")
    if rank is not None and num_ranks is not None:
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank is {rank} of num_ranks {num_ranks}: ranks count from 0")
        return rank, num_ranks
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed isn't initialised: call "
            "init_process_group before, or give rank and num_ranks"
        )
    return 0, 1
