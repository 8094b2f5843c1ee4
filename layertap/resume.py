"""Which plan a run works on: an unfinished one of the same rows, or a new one."""

import operator
from collections.abc import Callable, Collection
from functools import reduce
from itertools import count

import numpy as np
from numpy.typing import NDArray

from layertap.catalog import HAS_ENDED, Catalog, PlanRecord
from layertap.errors import FormatError, InputError, IntegrityError, NotFoundError
from layertap.keys import keys_xor
from layertap.plan import Plan
from layertap.records import may_be_tried_again
from layertap.shard_state import ShardState
from layertap.watcher import Watcher


def find_unfinished(catalog: Catalog, plan: Plan) -> PlanRecord | None:
    """An existing plan whose shards without an outcome hold just the keys of `plan`.

    Cutting the rest of an interrupted run anew would compute again what its surviving lanes have in hand.
    """
    for plan_id in catalog.plans():
        record = catalog.find_plan(plan_id)
        if record is None or record.settings != plan.settings:
            continue
        left = [record.shards[k] for k in catalog.without_outcome(plan_id)]
        xor = reduce(operator.xor, (int(shard.keys_xor, 16) for shard in left), 0)
        if (sum(shard.num_rows for shard in left), xor) == (len(plan.keys), int(keys_xor(plan.keys), 16)):
            return record
    return None


def take_up(
    catalog: Catalog,
    plan: Plan,
    unfinished: PlanRecord | None,
    tokens: Callable[[int], NDArray[np.int32]],
    *,
    max_batch_bytes: int,
    shards: Collection[int] = (),
) -> PlanRecord:
    """The plan a run works on: the unfinished one, its failed shards made to wait again, or `plan`.

    Rows that this plan stored before they were withdrawn, or refused for want of memory, get a new generation
    of it, whose shards nobody has settled.

    Args:
        catalog: of the root.
        plan: the rows to compute.
        unfinished: what `find_unfinished` found of it.
        tokens: token ids of the plan's k-th row, as they are extracted.
        max_batch_bytes: data bytes of its largest batch file.
        shards: those whose failures are forgotten; none means all.

    Raises:
        InputError: the plan has none of `shards`.
        DatasetError: a row's tokens aren't those of its key: the dataset changed since it was scanned.
    """
    record = unfinished
    if record is None:
        fresh = next(p for p in map(plan.again, count()) if not _is_spent(catalog, p.plan_id))
        record = catalog.put_plan(fresh, tokens, max_batch_bytes=max_batch_bytes)
    if strangers := sorted(set(shards) - set(catalog.without_outcome(record.plan_id))):
        raise InputError(
            f"shards {strangers} of plan {record.plan_id} can't be tried again: they are committed, or the "
            "plan isn't that of the dataset as it is now. Leave the shards out to do all that is missing"
        )
    for shard, status in Watcher(catalog, record.plan_id).poll().items():
        if status.claim and status.state not in HAS_ENDED and (not shards or shard in shards):
            catalog.retry(record.plan_id, shard, status.claim)
    return record


def _is_spent(catalog: Catalog, plan_id: str) -> bool:
    """Whether a plan can't serve again: its record can't be read, or rows of it count as not computed."""
    states = catalog.states(plan_id)
    if ShardState.VOID in states.values():
        return True
    committed = [k for k, state in states.items() if state == ShardState.COMMITTED]
    try:
        catalog.plan(plan_id)
    except NotFoundError:  # not written yet, or lost
        return bool(committed)
    except (FormatError, IntegrityError):
        return True
    return any(may_be_tried_again(row) for k in committed for row in catalog.outcome(plan_id, k).refused)
