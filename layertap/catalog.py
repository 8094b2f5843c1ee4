"""What a root holds and who works on what: the root's record, plans, claims, outcomes.

Every record is created once and says by its name what it is; a claim alone is overwritten, by its owner. A
shard's outcome is the only fence: until it stands nothing of the shard counts, and only one can be created.
"""

import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.errors import (
    AlreadyExistsError,
    CatalogError,
    ClaimLostError,
    DatasetError,
    FormatError,
    InputError,
    IntegrityError,
    NotFoundError,
    SpecMismatchError,
)
from layertap.keys import keys_xor
from layertap.plan import Plan
from layertap.records import (
    Claim,
    Outcome,
    PlanRecord,
    Root,
    ShardRecord,
    ShardRows,
    get_checked,
    read_record,
    require,
    to_json,
)
from layertap.settled import Settled, read_settled, way_out
from layertap.shard_state import ShardState, ShardStatus, shard_state, unended_claims
from layertap.spec import ExtractionSpec
from layertap.store import ObjectInfo, Store, checksum
from layertap.told import read_told

__all__ = [
    "Catalog",
    "Claim",
    "Outcome",
    "PlanRecord",
    "Root",
    "Settled",
    "ShardRecord",
    "ShardRows",
    "Snapshot",
]

ROOT = "layertap.json"
HAS_ENDED = (ShardState.COMMITTED, ShardState.VOID)

SHARD_FILE = re.compile(r"shard-(\d{5,})\.arrow")
DATA_OBJECT = re.compile(r"plans/([^/]+)/data/(\d{5,})/([^/]+)/.+")
STATE_OBJECT = re.compile(r"(\d{5,})\.((?:claim|release|retry|void)-\d+|fail-\d+\.[\w-]+|outcome)")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A plan's state folder at one moment, from one list."""

    names: dict[int, list[str]]
    """Shard -> its state objects without the shard's number; shards with none are left out."""

    claims: dict[int, tuple[int, ObjectInfo]]
    """Shard -> number and object of its latest claim."""


class Catalog:
    """Reads and writes the records of one root."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def create_root(self, root: Root) -> Root:
        """Make the root, or join it if it is for the same extraction.

        Raises:
            SpecMismatchError: it is for another; lists the fields that differ.
        """
        with suppress(AlreadyExistsError):
            self.store.create(ROOT, to_json(root.to_dict()))
        return self.root_for(root.spec)

    def root_for(self, spec: ExtractionSpec) -> Root:
        """The root's record, as `root`, if it is for this extraction.

        Raises:
            SpecMismatchError: it is for another; lists the fields that differ.
        """
        root = self.root()
        if differences := root.spec.differences(spec):
            raise SpecMismatchError(
                f"{self.store.uri} belongs to another extraction ({'; '.join(differences)}): "
                "give this one a root of its own"
            )
        return root

    def root(self) -> Root:
        """The root's record.

        Raises:
            CatalogError: there is no layertap root here.
            FormatError: written by a newer major format.
            IntegrityError: its record is damaged, or its spec was changed.
        """
        try:
            data = self.store.get(ROOT)
        except NotFoundError as error:
            raise CatalogError(
                f"{self.store.uri} holds no extraction: there is no {ROOT}. Check the address; a run makes it"
            ) from error
        return read_record(ROOT, data, Root.from_dict)

    def put_plan(
        self, plan: Plan, tokens: Callable[[int], NDArray[np.int32]], *, max_batch_bytes: int
    ) -> PlanRecord:
        """Write a plan with its rows, or load it if it stands already.

        Args:
            plan: the plan.
            tokens: token ids of the plan's k-th row, as they are extracted.
            max_batch_bytes: data bytes of its largest batch file.

        Raises:
            DatasetError: a row's tokens aren't those of its key: the dataset changed since it was scanned.
        """
        with suppress(NotFoundError):
            return self.plan(plan.plan_id)
        record = PlanRecord(
            plan_id=plan.plan_id,
            spec_fingerprint=plan.spec_fingerprint,
            settings=plan.settings,
            shards=tuple(
                self._put_shard(plan, shard, part, tokens) for shard, part in enumerate(plan.shard_slices())
            ),
            max_batch_bytes=max_batch_bytes,
        )
        with suppress(AlreadyExistsError):
            self.store.create(f"plans/{plan.plan_id}/plan.json", to_json(asdict(record)))
        return self.plan(plan.plan_id)

    def _put_shard(
        self, plan: Plan, shard: int, part: slice, tokens: Callable[[int], NDArray[np.int32]]
    ) -> ShardRecord:
        rows = ShardRows.of(
            plan.keys[part], plan.batch[part], [tokens(k) for k in range(part.start, part.stop)]
        )
        if not rows.match_keys():
            raise DatasetError("the dataset's rows changed while the plan was made: start the run again")
        data = rows.to_arrow()
        self.store.put(_shard_path(plan.plan_id, shard), data, durable=True)
        return ShardRecord(
            num_rows=len(rows.keys),
            num_tokens=len(rows.values),
            num_batches=int(rows.batch[-1]) + 1,
            keys_xor=keys_xor(rows.keys),
            checksum=checksum(data),
        )

    def plan(self, plan_id: str) -> PlanRecord:
        """A plan's record.

        Raises:
            NotFoundError: no such plan, or not all of it is written yet.
            FormatError: it has another schema.
            IntegrityError: it was damaged.
        """
        path = f"plans/{plan_id}/plan.json"
        return read_record(path, self.store.get(path), PlanRecord.from_dict)

    def find_plan(self, plan_id: str) -> PlanRecord | None:
        """A plan's record, as `plan`; None if it has another schema or, with a warning, if it was damaged."""
        with suppress(FormatError):  # of another layertap: its lanes will finish it, or nobody
            return read_told(self.store, f"plans/{plan_id}/plan.json", PlanRecord.from_dict)
        return None

    def plan_spec(self, plan_id: str) -> str:
        """Fingerprint of the spec that a plan, of whatever schema, is for."""
        path = f"plans/{plan_id}/plan.json"
        return read_record(path, self.store.get(path), lambda values: str(values["spec_fingerprint"]))

    def plans(self) -> list[str]:
        """Ids of the plans that stand, ascending."""
        return [p for p in self.store.folders("plans") if self.store.exists(f"plans/{p}/plan.json")]

    def shards(self, plan_id: str) -> list[int]:
        """Numbers of a plan's shards, by files and states if the plan's record can't be read; ascending."""
        with suppress(NotFoundError, IntegrityError, FormatError):
            return [*range(len(self.plan(plan_id).shards))]
        found = (SHARD_FILE.fullmatch(name) for name in self.store.names(f"plans/{plan_id}"))
        return sorted({int(match[1]) for match in found if match} | {*self.snapshot(plan_id).names})

    def shard_rows(self, plan_id: str, shard: int, plan: PlanRecord | None = None) -> ShardRows:
        """The rows of a shard.

        Args:
            plan_id: its plan.
            shard: its number.
            plan: the plan's record, which is read by default.

        Raises:
            IntegrityError: their file was damaged, or is gone; says how to compute them again.
        """
        record = plan or self.plan(plan_id)
        expected, path = record.shards[shard].checksum, _shard_path(plan_id, shard)
        try:
            return ShardRows.from_arrow(get_checked(self.store, path, expected))
        except (IntegrityError, NotFoundError) as error:
            raise IntegrityError(f"{error}. {way_out(self.store.uri, plan_id, shard)}") from error

    def attempt_prefix(self, plan_id: str, shard: int, attempt: str) -> str:
        """Folder of the files of one try."""
        return f"plans/{plan_id}/data/{shard:05d}/{attempt}"

    def snapshot(self, plan_id: str) -> Snapshot:
        """The state of all shards, from one list."""
        names: dict[int, list[str]] = defaultdict(list)
        claims: dict[int, tuple[int, ObjectInfo]] = {}
        folder = f"plans/{plan_id}/state"
        for info in self.store.list(folder):
            match = STATE_OBJECT.fullmatch(info.path.removeprefix(f"{folder}/"))
            if not match:  # a stop, or a file of others, such as .DS_Store
                continue
            shard, name = int(match[1]), match[2]
            names[shard].append(name)
            if name.startswith("claim-"):
                found = (int(name.removeprefix("claim-")), info)
                claims[shard] = max(found, claims.get(shard, found), key=lambda c: c[0])
        return Snapshot(names=dict(names), claims=claims)

    def states(self, plan_id: str) -> dict[int, ShardState]:
        """States of the shards of which there is a state object, whoever lives; ascending."""
        names = self.snapshot(plan_id).names
        return {k: shard_state(names[k]).state for k in sorted(names)}

    def committed(self, plan_id: str) -> list[int]:
        """Shards of a plan whose outcome stands."""
        return [k for k, state in self.states(plan_id).items() if state == ShardState.COMMITTED]

    def without_outcome(self, plan_id: str) -> list[int]:
        """Shards of a plan that may still come to an outcome: those with one, or withdrawn, are left out."""
        names = self.snapshot(plan_id).names
        states = [shard_state(names.get(k, ())).state for k in range(len(self.plan(plan_id).shards))]
        return [k for k, state in enumerate(states) if state not in HAS_ENDED]

    def claim(
        self, plan_id: str, shard: int, number: int, *, lane: str, details: dict[str, Any]
    ) -> Claim | None:
        """Claim a shard under the next number.

        Returns:
            The claim, or None: somebody else was first.
        """
        token = secrets.token_hex(8)
        claim = Claim(plan_id=plan_id, shard=shard, number=number, lane=lane, token=token, details=details)
        try:
            self.store.create(_claim_path(claim), to_json(_claim_content(claim, {})))
        except AlreadyExistsError:
            if self.read_claim(plan_id, shard, number).get("token") != claim.token:
                return None
        return claim

    def beat(self, claim: Claim, progress: dict[str, Any]) -> None:
        """Show that the claim's lane lives, and how far it is."""
        self.store.put(_claim_path(claim), to_json(_claim_content(claim, progress)))

    def read_claim(self, plan_id: str, shard: int, number: int) -> dict[str, Any]:
        """A claim as last beaten: lane, details, progress; empty, with a warning, if it is damaged.

        Raises:
            NotFoundError: no such claim.
        """
        path = f"{_state(plan_id, shard)}.claim-{number}"
        return read_told(self.store, path, lambda claim: require(claim, "lane", "token")) or {}

    def fail(self, claim: Claim, failure: dict[str, Any]) -> None:
        """Record why the claim's lane gave the shard up; it may be claimed again."""
        self._create_own(f"fail-{claim.number}.{_safe(claim.lane)}", claim, failure)

    def release(self, claim: Claim) -> None:
        """Give the shard back through no fault of it, as a lane does that was told to stop."""
        self._create_own(f"release-{claim.number}", claim, {"lane": claim.lane})

    def release_lanes(self, plan_id: str, lanes: Collection[str]) -> None:
        """Give back what lanes held that are gone through no fault of it, and couldn't say so themselves."""
        if not lanes:
            return
        for shard, names in self.snapshot(plan_id).names.items():
            for number in unended_claims(names):
                told = self.read_claim(plan_id, shard, number)
                if (lane := told.get("lane", "")) in lanes:
                    claim = Claim(plan_id=plan_id, shard=shard, number=number, lane=lane, token=told["token"])
                    self.release(claim)

    def _create_own(self, name: str, claim: Claim, values: dict[str, Any]) -> None:
        with suppress(AlreadyExistsError):
            self.store.create(f"{_state(claim.plan_id, claim.shard)}.{name}", to_json(values))

    def retry(self, plan_id: str, shard: int, number: int) -> None:
        """Forget failures and deaths of the shard's claims up to `number`."""
        with suppress(AlreadyExistsError):
            self.store.create(f"{_state(plan_id, shard)}.retry-{number}", to_json({}))

    def void(self, plan_id: str, shard: int, *, reason: str) -> None:
        """Withdraw a shard for good, committed or not: its files don't count, its rows aren't stored."""
        number = shard_state(self.snapshot(plan_id).names.get(shard, ())).claim
        with suppress(AlreadyExistsError):
            self.store.create(f"{_state(plan_id, shard)}.void-{number}", to_json({"reason": reason}))

    def last_failure(self, plan_id: str, shard: int, status: ShardStatus) -> dict[str, Any]:
        """The last recorded failure of a shard with failures or deaths, since its last retry.

        If there is none, what the last claim said whose lane died, with an `error` that tells of these lanes.
        """
        if not status.last_failure:
            error = f"{status.num_deaths} lanes died while they held shard {shard}, none left an error"
            told = self.read_claim(plan_id, shard, status.last_death)
            return {**told, "claim": status.last_death, "error": error}
        path = f"{_state(plan_id, shard)}.{status.last_failure}"
        failure = read_told(self.store, path, lambda failure: require(failure, "error"))
        return failure or {"error": f"its record is damaged: {path}"}

    def commit(self, claim: Claim, outcome: Outcome) -> Outcome:
        """Make the files of the outcome's attempt count: the first who does it for a shard wins.

        Returns:
            The outcome that stands, the same one.

        Raises:
            ClaimLostError: another lane was first; these files are garbage.
        """
        path = f"{_state(claim.plan_id, claim.shard)}.outcome"
        data = to_json(outcome.to_dict())
        try:
            self.store.create(path, data)
        except AlreadyExistsError as error:
            if outcome.attempt.encode() not in bytes(self.store.get(path)):  # it names this try alone
                standing = self.outcome(claim.plan_id, claim.shard)
                raise ClaimLostError(
                    f"shard {claim.shard} has an outcome of lane {standing.lane} "
                    f"(claim {standing.claim}); lane {claim.lane} (claim {claim.number}) drops its work"
                ) from error
            self.store.put(path, data, durable=True)  # its own, by a try whose reply got lost, unconfirmed
        return outcome

    def outcome(self, plan_id: str, shard: int) -> Outcome:
        """The outcome of a shard.

        Raises:
            NotFoundError: there is none yet.
        """
        path = f"{_state(plan_id, shard)}.outcome"
        return read_record(path, self.store.get(path), Outcome.from_dict)

    def stop(self, plan_id: str, run: str) -> None:
        """Tell the lanes of one run on a plan to end at their next beat; other runs on it go on."""
        self.store.put(f"plans/{plan_id}/state/stop-{run}", to_json({}))

    def stopping(self, plan_id: str, run: str) -> bool:
        """Whether the run's lanes were told to end."""
        return self.store.exists(f"plans/{plan_id}/state/stop-{run}")

    def settled(self) -> Settled:
        """Every row that needs no computing any more, over the outcomes of all plans.

        Raises:
            CatalogError: a plan is of another extraction than the root.
        """
        return read_settled(self)


def shard_of(path: str) -> tuple[str, int]:
    """Plan and number of the shard whose data lies in this file."""
    match = DATA_OBJECT.fullmatch(path)
    assert match, path
    return match[1], int(match[2])


def _state(plan_id: str, shard: int) -> str:
    return f"plans/{plan_id}/state/{shard:05d}"


def _shard_path(plan_id: str, shard: int) -> str:
    return f"plans/{plan_id}/shard-{shard:05d}.arrow"


def _claim_path(claim: Claim) -> str:
    return f"{_state(claim.plan_id, claim.shard)}.claim-{claim.number}"


def _claim_content(claim: Claim, progress: dict[str, Any]) -> dict[str, Any]:
    """What a claim says; no two beats say the same, or a store's content tags would stand still."""
    own = {"lane": claim.lane, "token": claim.token, "beat": time.monotonic_ns()}
    return {**claim.details, **progress, **own}


def _safe(lane: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", lane)


def refuse_unknown(plan_id: str, shards: Iterable[int], there: Sequence[int]) -> None:
    """Refuse shards that aren't among those of a plan, ascending from 0.

    Raises:
        InputError: names the first of them.
    """
    if unknown := sorted({*shards} - {*there}):
        raise InputError(f"plan {plan_id} has no shard {unknown[0]}; its shards are 0 to {there[-1]}")
