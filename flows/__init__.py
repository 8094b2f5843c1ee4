"""Prefect flows: which tasks run where and in what order; the arithmetic is in `layertap`."""

from typing import Any

OPTIONS: dict[str, Any] = {"persist_result": False, "result_serializer": "json"}
"""What all flows share: they end in a state with a message, and keep no result, least of all a pickle."""

DEFAULT_STORAGE = "s3-bucket/layertap"
"""Storage block that is meant where none is named."""
