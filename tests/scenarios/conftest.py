"""The option that writes down what happens now as what is expected."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rewrite-scenarios`; read the difference before you keep it."""
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write the present output into tests/scenarios/*.txt instead of comparing",
    )


@pytest.fixture
def rewrites(request: pytest.FixtureRequest) -> bool:
    """Whether the transcripts are written anew; never, if only `pytest` was said."""
    return bool(request.config.getoption("--rewrite-scenarios", default=False))
