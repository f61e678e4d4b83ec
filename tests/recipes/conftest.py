"""A tiny random model for values, a trained one for what recipes are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import insitu


@pytest.fixture
def model(llama: Any) -> Any:
    return llama


@pytest.fixture(scope="module")
def smol() -> Iterator[Any]:
    with insitu.VLLM(insitu.demo_model(), dtype="float32", max_model_len=128, enforce_eager=True) as model:
        yield model
