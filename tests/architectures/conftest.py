"""Engines for the architectures: one at a time, closed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import insitu
from tests.architectures.configs import ARCHITECTURES
from tests.architectures.reference import oracle
from tests.architectures.tiny import tiny


def params(names: list[str]) -> list[Any]:
    """Architectures as parameters, all but the quick ones marked as slow."""
    return [name if ARCHITECTURES[name].quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@contextmanager
def engine(engines: Any, name: str, dtype: str) -> Iterator[Any]:
    oracle(name)  # before vLLM may change transformers' classes
    settings = {"dtype": dtype, "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 32}
    with insitu.VLLM(tiny(name), dispatch=True, **settings) as model:
        yield model


@pytest.fixture(scope="package", params=params(list(ARCHITECTURES)))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="package")
def model(name: str, engines: Any) -> Iterator[Any]:
    with engine(engines, name, "float32") as made:
        yield made
