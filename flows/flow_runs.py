"""Flow runs as Prefect's server tells them, however many they are."""

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun

PAGE = 200
"""Flow runs that the server tells at once."""


def read_flow_runs(
    client: SyncPrefectClient, wanted: FlowRunFilter, of: FlowFilter | None = None
) -> list[FlowRun]:
    """All flow runs that are wanted, of all flows or of some."""
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(flow_filter=of, flow_run_filter=wanted, limit=PAGE, offset=len(found))
        found += page
        if len(page) < PAGE:
            return found
