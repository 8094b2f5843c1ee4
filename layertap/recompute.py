"""Rows computed once more on the target and compared with what is stored.

On the same kind of GPU with the same kernels a state may differ by matrix shapes alone: its median relative
error is at most 1 %. Elsewhere rounding differs more, and what counts is what a drafter learns from: the
target's predictions, compared by the KL divergence of the logits.
Shapes: T tokens of a row, H hidden size, V vocabulary.
"""

from contextlib import suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from layertap.catalog import Catalog
from layertap.errors import IntegrityError, NotFoundError
from layertap.gpu_caches import one_compiles
from layertap.host import find_device
from layertap.store import Buffer, Store
from layertap.stored_rows import StoredFile, StoredRow, states_of, wrong_row
from layertap.target import NOISE_TOLERANCE, Target, relative_error
from layertap.verify import Finding, Verification

SAME_PATH_TOLERANCE = 0.01
"""Median relative error of the states, where the same kind of device ran the same kernels."""

KL_TOLERANCE = 1e-3
"""Mean KL divergence of the logits elsewhere, in nats."""

TOKENS_AT_ONCE = 256
"""Positions whose logits are compared at a time."""

PATH_FIELDS = ("dtype", "quantization", "attention", "compiled", "kernels")


def recompute(
    store: Store, files: list[StoredFile], report: Verification, *, target: str, revision: str | None = None
) -> None:
    """Compute the files' drawn rows again, and add to the report what came of it.

    Rows that compiled layers computed on such a device come last, by compiled layers.

    Raises:
        TargetError: the target can't be loaded or compiled here, or isn't the one of the root.
    """
    spec = Catalog(store).root().spec
    loaded, head = Target.load_with_head(target, spec=spec, revision=revision, device=find_device())
    comparison = _Comparison(store, loaded, head, report)
    compiled = [file for file in files if comparison.needs_compiling(file)]
    comparison.add_all([file for file in files if file not in compiled])
    if compiled:
        comparison.compile(max(row.num_tokens for file in compiled for row in file.drawn))
        comparison.add_all(compiled)
    comparison.finish()


class _Comparison:
    """Errors of all rows, and what they are held against."""

    def __init__(self, store: Store, target: Target, head: nn.Module, report: Verification) -> None:
        self._store = store
        self._target = target
        self._head = head
        self._report = report
        self._environment = target.environment()
        self._same_path: list[tuple[float, StoredFile]] = []
        self._divergences: list[tuple[float, StoredFile]] = []
        self._num_rows = 0

    def needs_compiling(self, file: StoredFile) -> bool:
        """Whether a device like this one computed the file with compiled layers."""
        there = file.outcome.environment
        return bool(there.get("compiled")) and _device_name(there) == _device_name(self._environment)

    def compile(self, num_tokens: int) -> None:
        """Compute from now on as lanes that compile do, rows of up to so many tokens."""
        with one_compiles(self._target.device):
            self._target.compile(max_batch_tokens=num_tokens)
        self._environment = self._target.environment()

    def add_all(self, files: list[StoredFile]) -> None:
        """Compare the drawn rows."""
        for file in files:
            for row in file.drawn:
                self.add(file, row)

    def add(self, file: StoredFile, row: StoredRow) -> None:
        """Compare one row; one that differs by more than any device does is named."""
        data = self._read(file, row)
        if data is None:  # named already
            return
        self._num_rows += 1
        ids_T = torch.frombuffer(bytearray(data[-4 * row.num_tokens :]), dtype=torch.int32)
        stored = states_of(row, data, self._target.spec)
        taps = self._target.tap(ids_T[None].to(self._target.device))
        fresh = {name: tap[0] for name, tap in zip(self._target.state_names, taps, strict=True)}
        errors = {name: relative_error(stored[name].to(fresh[name].device), fresh[name]) for name in fresh}
        worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
        tolerance = NOISE_TOLERANCE[self._target.spec.dtype]
        if not errors[worst] <= tolerance:
            what = f"{worst} differs from the recomputed one by {errors[worst]:.1e}, more than {tolerance:g}"
            self._find(f"{file.path} row {row.key.hex()}", what, file)
        if self._is_same_path(file):
            self._same_path.append((errors[worst], file))
        elif "last_hidden_state" in fresh:
            last = "last_hidden_state"
            self._divergences.append((self._kl(fresh[last], stored[last].to(fresh[last].device)), file))

    def _read(self, file: StoredFile, row: StoredRow) -> Buffer | None:
        """The row's bytes; None if they aren't those that were written, in two tries."""
        with suppress(NotFoundError, IntegrityError):
            for _ in range(2):
                data = self._store.get_range(file.path, row.offset, row.nbytes)
                if wrong_row(row, data, self._target.spec) is None:
                    return data
        return None

    def finish(self) -> None:
        """Hold the rows together against the tolerance, and say what it was."""
        said = []
        if self._same_path:
            error = median(error for error, _ in self._same_path)
            said.append(f"{len(self._same_path):,} by the same path: median relative error {error:.1e}")
            self._judge(error, SAME_PATH_TOLERANCE, "median relative error", self._same_path)
        if self._divergences:
            mean = sum(kl for kl, _ in self._divergences) / len(self._divergences)
            said.append(f"{len(self._divergences):,} by another path: mean KL of the logits {mean:.1e}")
            self._judge(mean, KL_TOLERANCE, "mean KL of the logits", self._divergences)
        others = self._num_rows - len(self._same_path) - len(self._divergences)
        if others:
            tolerance = NOISE_TOLERANCE[self._target.spec.dtype]
            said.append(f"{others:,} by another path: states within {tolerance:g}, logits not stored")
        counted = f"{self._num_rows:,} rows recomputed"
        self._report.recomputed = f"{counted}, {'; '.join(said)}" if said else counted

    def _judge(self, found: float, tolerance: float, what: str, rows: list[tuple[float, StoredFile]]) -> None:
        if not found <= tolerance:
            _, file = max(rows, key=lambda row: (row[0] != row[0], row[0]))
            self._find(
                file.path, f"the {what} of recomputed rows is {found:.1e}, more than {tolerance:g}", file
            )

    def _find(self, where: str, problem: str, file: StoredFile) -> None:
        self._report.findings.append(Finding(where=where, problem=problem, way_out=file.way_out))

    def _is_same_path(self, file: StoredFile) -> bool:
        return _path(file.outcome.environment) == _path(self._environment)

    @torch.inference_mode()
    def _kl(self, fresh_TH: Tensor, stored_TH: Tensor) -> float:
        """Mean over tokens of KL(fresh ‖ stored) of the next token's distribution, in nats."""
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(fresh_TH), TOKENS_AT_ONCE):
            fresh, stored = (states[start : start + TOKENS_AT_ONCE] for states in (fresh_TH, stored_TH))
            log_p, log_q = (
                self._head(self._target.normed(x)).float().log_softmax(-1) for x in (fresh, stored)
            )
            total += (log_p.exp() * (log_p - log_q)).sum().double().cpu()
        return float(total) / len(fresh_TH)


def _path(environment: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be the same for the same rounding: the kind of device and the code that ran on it."""
    return (_device_name(environment), *(environment.get(field) for field in PATH_FIELDS))


def _device_name(environment: dict[str, Any]) -> str | None:
    name: str | None = environment.get("device", {}).get("name")
    return name
