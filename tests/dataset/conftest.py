"""A small data set, in each of the forms that it may have."""

from __future__ import annotations

from typing import Any

import pytest

from tests import models

TEXTS = [f"{'the cat sat on ' * (1 + number % 3)}mat {number}" for number in range(11)]


@pytest.fixture
def texts() -> list[str]:
    return TEXTS


@pytest.fixture
def model(llama: Any) -> Any:
    return llama


@pytest.fixture
def folder() -> str:
    return models.tiny("llama")
