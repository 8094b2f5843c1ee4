"""What the contracts share: the roots, each with the rows as plain Hugging Face computes them."""

import pytest

from tests.contracts.plain import MODELS, Plain


@pytest.fixture(params=MODELS)
def plain(request: pytest.FixtureRequest) -> Plain:
    """One of the targets."""
    return Plain(request.param)
