"""SpecForge reads a root: a feature store and the references of its samples.

    store = LayertapFeatureStore(root, algorithm="dflash")
    trainer = build_disagg_offline_runtime(feature_store=store, refs=store.refs(), …)

The tensors are those of its offline feature files. SpecForge's layer ids are layertap's.
"""

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from specforge.runtime.contracts import FeatureHandle, SampleRef
from specforge.runtime.data_plane.feature_store import FeatureStore
from torch import Tensor

from layertap.store import Store
from layertap.trainers.layouts import SPECFORGE_NEEDS, Algorithm, specforge_tensors
from layertap.trainers.rows import open_rows


class LayertapFeatureStore(FeatureStore):
    """The rows of a version as SpecForge's samples, read when they are asked for. Read-only.

    Args:
        root: the root: a path, `s3://bucket/prefix`, or a Store.
        algorithm: which of SpecForge's algorithms is trained.
        version: which version; by default the newest complete one.

    Raises:
        CatalogError: the root can't serve that algorithm; says why.
    """

    def __init__(self, root: Store | str | Path, *, algorithm: Algorithm, version: int | None = None) -> None:
        self.rows = open_rows(root, SPECFORGE_NEEDS[algorithm], version=version)
        self.algorithm = algorithm
        self._leases = itertools.count()

    def refs(self, *, ttt_length: int = 7, max_len: int = 2048) -> list[SampleRef]:
        """References of all samples, in the dataset's order.

        Args:
            ttt_length: training-time-test length, which SpecForge hands on with each sample.
            max_len: tokens at which SpecForge's normaliser cuts a sample; rows of which it would then find
                nothing to train on, and stop, are left out with a warning.
        """
        states, sizes = self.rows.states, self.rows.num_tokens
        kept = self._long_enough(max_len)
        names = list(specforge_tensors(self.rows[0], self.algorithm))
        metadata = {
            "format": f"offline_{self.algorithm}",
            "target_repr": "hidden_state" if self.rows.needs.last else None,
            "ttt_length": ttt_length,
            "max_len": max_len,
        }
        return [
            SampleRef(
                sample_id=f"{states.version.content}:{i}",
                run_id=states.version.content,
                source_task_id=None,
                feature_store_uri=f"layertap:{i}",
                feature_keys={name: name for name in names},
                feature_specs={},
                strategy=self.algorithm,
                target_model_version=states.spec.target_identity,
                num_tokens=int(sizes[i]),
                metadata=metadata,
            )
            for i in kept
        ]

    def _long_enough(self, max_len: int) -> list[int]:
        """The rows that SpecForge takes when it cuts them there."""
        if not self.rows.needs.wants_pair:
            return list(range(len(self.rows)))
        kept: list[int] = np.flatnonzero(self.rows.has_pair(max_len)).tolist()
        if num_lost := len(self.rows) - len(kept):
            warnings.warn(
                f"{num_lost} of {len(self.rows)} rows are left out: no two in succession of their first "
                f"{max_len} tokens are supervised; a larger max_len keeps more of them",
                stacklevel=3,
            )
        return kept

    def get(
        self, sample_ref: SampleRef, *, device: Any = "cpu", names: list[str] | None = None
    ) -> tuple[dict[str, Tensor], FeatureHandle]:
        """The tensors of a sample, all of them unless `names` says which."""
        row = self.rows[int(sample_ref.feature_store_uri.removeprefix("layertap:"))]
        tensors = specforge_tensors(row, self.algorithm)
        wanted = list(sample_ref.feature_keys) if names is None else names
        handle = FeatureHandle(
            sample_id=sample_ref.sample_id, generation=0, lease_token=str(next(self._leases))
        )
        return {name: tensors[name].to(device) for name in wanted}, handle

    def put(self, tensors: dict[str, Tensor], *, sample_id: str, metadata: dict[str, Any]) -> SampleRef:
        """Refuse: the store is read-only."""
        raise NotImplementedError("a layertap root is written by extractions alone")

    def release(self, handle: FeatureHandle, *, reason: str = "consumed") -> None:
        """Nothing to give back: nothing is held."""

    def abort(self, sample_id: str, *, reason: str) -> None:
        """Nothing to give up: nothing is held."""

    def health(self) -> dict[str, Any]:
        """Number of samples."""
        return {"num_samples": len(self.rows)}
