"""What a run is asked to do, and its plan before anything is written: checked, and told to a person."""

import shlex
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from layertap.catalog import Catalog
from layertap.dataset import BLOCK_TOKENS, Columns, Scan, TokenDataset
from layertap.findings import Findings
from layertap.host import host_name
from layertap.plan import Estimate, Plan, PlanSettings, estimate, make_plan
from layertap.progress import format_bytes
from layertap.report import check_refused
from layertap.spec import DTypeName, ExtractionSpec, LastHiddenState
from layertap.target_info import TargetInfo, inspect_target

TRAINERS_THAT_NEED_LAST = ("speculators", "ModelOpt", "EAGLE-3 in SpecForge", "Automodel", "DeepSpec")
"""Trainers that read the last hidden state whatever their loss, so that `none` shuts them out."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is asked to do."""

    dataset: str
    """Path of the tokenised dataset: an Arrow folder, a Parquet file or a folder of them."""

    target: str
    """Hub id or folder of the target."""

    layer_ids: tuple[int, ...]
    """0-based decoder-layer outputs."""

    revision: str | None = None
    """Hub revision of the target; None is its main branch."""

    split: str | None = None
    """Split of a dictionary of datasets."""

    columns: Columns = field(default_factory=Columns)
    """Names of the dataset's columns."""

    last_hidden_state: LastHiddenState = "pre_norm"
    dtype: DTypeName = "bfloat16"
    max_length: int = 4096

    too_long: Literal["truncate", "refuse"] = "truncate"
    """What happens to rows longer than `max_length` tokens."""

    plan: PlanSettings = field(default_factory=PlanSettings)

    max_refused_share: float = 0.01
    """Share of the dataset's rows that may be missing in the end before the run counts as failed."""

    check_space: bool = True
    """Whether a folder must have room for all that is to be stored before anything is."""

    def plan_command(self) -> str:
        """The command that checks the same rows in the same way."""
        options = {
            "target": self.target,
            "revision": self.revision,
            "layers": ",".join(map(str, self.layer_ids)),
            "max-length": self.max_length,
            "too-long": self.too_long,
            "split": self.split,
            "input-ids-column": self.columns.input_ids,
            "loss-mask-column": self.columns.loss_mask,
            "id-column": self.columns.row_id,
        }
        named = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return shlex.join(["layertap", "plan", self.dataset, *named])


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A plan before it is written, and all that led to it; made without a store."""

    settings: RunSettings
    dataset: TokenDataset
    info: TargetInfo
    spec: ExtractionSpec
    scan: Scan

    @classmethod
    def make(cls, settings: RunSettings) -> Self:
        """Open the dataset, read the target's config, and check every row against it.

        Raises:
            DatasetError, TargetError, SpecError: the input can't be extracted as asked.
            TooManyRefusedError: more rows are unfit than the policy allows.
            NotReadyError: several of these; all are in its message.
        """
        found = Findings("the run can't be planned as asked")
        with found.noted():
            dataset = TokenDataset.open(settings.dataset, split=settings.split, columns=settings.columns)
        with found.noted():
            info = inspect_target(settings.target, revision=settings.revision)
            spec = _spec(settings, info)
        found.check()
        scan = dataset.scan(
            vocab_size=info.vocab_size, max_length=spec.max_length, too_long=settings.too_long
        )
        with found.noted():
            way_out = (  # a dataset on S3 is a copy on this host by now, which goes when the dataset changes
                "Mend the dataset, or raise max_refused_share. "
                f"On host {host_name()}, until the dataset changes, "
                f"`{settings.plan_command()}` shows more of them."
            )
            check_refused(scan.refused, dataset.num_rows, settings.max_refused_share, way_out)
        with found.noted():
            info.check_length(int(scan.num_tokens.max()))
        found.check()
        return cls(settings=settings, dataset=dataset, info=info, spec=spec, scan=scan)

    def plan(self, rows: NDArray[np.int64] | None = None) -> Plan:
        """Cut the given rows of the dataset, or all distinct ones, into batches and shards."""
        chosen = self.scan.unique(settled=None) if rows is None else rows
        return make_plan(
            self.scan.keys[chosen],
            self.scan.num_tokens[chosen],
            spec_fingerprint=self.spec.fingerprint,
            settings=self.settings.plan,
        )

    def missing_in(self, catalog: Catalog) -> NDArray[np.int64]:
        """The rows that a root doesn't hold yet.

        Raises:
            CatalogError: there is no root.
            SpecMismatchError: the root belongs to another extraction.
        """
        catalog.root_for(self.spec)
        return self.scan.unique(settled=catalog.settled().final_keys)

    def estimate(self, plan: Plan) -> Estimate:
        """What the plan will cost."""
        return estimate(
            plan,
            spec=self.spec,
            hidden_size=self.info.hidden_size,
            num_parameters=self.info.executed_parameters(self.spec),
        )

    def table(self, plan: Plan) -> list[tuple[str, str]]:
        """The plan in rows of a name and a value, for a person."""
        cost, scan = self.estimate(plan), self.scan
        num_valid = int(np.count_nonzero(scan.num_tokens))
        num_unsupervised = num_valid - int(np.count_nonzero(scan.num_supervised))
        rows = [
            ("rows in the dataset", f"{self.dataset.num_rows:,}"),
            ("rows refused", f"{len(scan.refused):,}"),
            ("rows truncated", f"{scan.num_truncated:,} to {self.spec.max_length:,} tokens"),
            ("supervised tokens", f"{scan.num_supervised[scan.num_tokens > 0].sum(dtype=np.int64):,}"),
            ("rows without a supervised token", f"{num_unsupervised:,}"),
            (
                f"rows with too few of them for a block of {BLOCK_TOKENS}",
                f"{np.count_nonzero(scan.has_few_supervised):,}",
            ),
            ("rows stored already, or equal to another", f"{num_valid - cost.num_rows:,}"),
            ("rows to extract", f"{cost.num_rows:,}"),
            ("tokens to extract", f"{cost.num_tokens:,}"),
            ("batches in shards", f"{cost.num_batches:,} in {cost.num_shards:,}"),
            ("padding", f"{cost.padding_share:.2%}"),
            ("to be stored", format_bytes(cost.data_bytes)),
            ("store requests", f"{cost.num_requests:,}"),
            ("GPU-hours on an H200", f"{cost.gpu_hours:.2f}"),
            ("layers (0-based outputs)", ", ".join(map(str, self.spec.layer_ids))),
            ("last hidden state", self.spec.last_hidden_state),
            ("target", self.spec.target_identity),
            ("provenance of the dataset", self._provenance()),
        ]
        if not self.spec.stores_last:
            rows.append(("can't be trained on by", ", ".join(TRAINERS_THAT_NEED_LAST)))
        return rows

    def _provenance(self) -> str:
        """Who wrote the responses moves a drafter's acceptance more than any numerics: say if unknown."""
        provenance = self.dataset.provenance
        if not provenance["recorded"]:
            return "UNKNOWN: the dataset has no provenance.json"
        return f"recorded; responses by: {provenance.get('responses', 'unknown')}"


def _spec(settings: RunSettings, info: TargetInfo) -> ExtractionSpec:
    spec = ExtractionSpec(
        target_identity=info.identity,
        layer_ids=settings.layer_ids,
        last_hidden_state=settings.last_hidden_state,
        dtype=settings.dtype,
        max_length=settings.max_length,
    )
    spec.check_against(info.num_hidden_layers)
    return spec
