"""Prefect flows: which tasks run where and in what order; the arithmetic is in `layertap`."""
