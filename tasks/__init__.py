"""Prefect tasks and what they need from Prefect: storage blocks, artifacts."""
