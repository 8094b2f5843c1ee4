"""The shard task: one shard of a plan, extracted and committed by the lane that claimed it."""

from typing import Any

import httpx
from prefect import task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException
from prefect.filesystems import WritableFileSystem
from prefect.futures import PrefectFuture
from prefect.tasks import Task, exponential_backoff

from layertap.catalog import Claim, Outcome
from layertap.errors import is_retriable
from layertap.lane import Lane

RETRIES = 3

SERVER_ERRORS = (httpx.HTTPError, PrefectException)
"""What a task fails with when Prefect's server is away or refuses it; a lane raises neither."""

_in_hand: dict[tuple[str, int, int], tuple[Lane, Claim]] = {}
"""Plan, shard and claim number -> what the task needs. A lane holds a model: it can't be a task's parameter,
which Prefect would walk through and hash."""


def submit_shard(lane: Lane, claim: Claim, *, storage: WritableFileSystem, root: str) -> PrefectFuture[Any]:
    """Extract the claim's shard in a task of its own; to be called from the lane's flow.

    No block's name is passed: every task would ask the server for it, which may be away.
    """
    _in_hand[claim.plan_id, claim.shard, claim.number] = lane, claim
    return extract_shard.with_options(result_storage=storage).submit(
        root=root, plan_id=claim.plan_id, shard=claim.shard, claim=claim.number, token=claim.token
    )


def _worth_another_try(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_retriable(error)


def _result_key(context: TaskRunContext, inputs: dict[str, Any]) -> str:
    """A claim's token is random, so that no other claim is ever answered with this one's result."""
    shard = f"{inputs['shard']:05d}.claim-{inputs['claim']}-{inputs['token']}"
    return f"{inputs['root']}/results/{inputs['plan_id']}/{shard}.json"


@task(
    name="extract_shard",
    task_run_name="shard-{shard:05d}",
    retries=RETRIES,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_jitter_factor=0.5,
    retry_condition_fn=_worth_another_try,
    cache_policy=CacheKeyFnPolicy(cache_key_fn=_result_key),
    persist_result=True,
    result_serializer="json",
    cache_result_in_memory=False,
)
def extract_shard(root: str, plan_id: str, shard: int, claim: int, token: str) -> dict[str, Any]:
    """Extract one shard and commit it; returns only once it is committed.

    Args:
        root: folder of the root under the storage block.
        plan_id: the plan the shard belongs to.
        shard: its number.
        claim: number of the claim under which this lane holds it.
        token: the claim's.
    """
    lane, claimed = _in_hand[plan_id, shard, claim]
    return manifest(lane.extract(claimed))


def manifest(outcome: Outcome) -> dict[str, Any]:
    """What Prefect keeps of a committed shard; the whole of it is the outcome in the store."""
    return {
        "shard": outcome.shard,
        "claim": outcome.claim,
        "attempt": outcome.attempt,
        "lane": outcome.lane,
        "num_rows": outcome.num_rows,
        "num_tokens": outcome.num_tokens,
        "nbytes": outcome.nbytes,
        "num_refused": len(outcome.refused),
    }
