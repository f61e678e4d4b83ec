"""Models that most engine tests run on: one whose trunk carries a pair, one that carries a tensor."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["llama", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)
