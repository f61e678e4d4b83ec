"""Models that most engine tests run on: one whose trunk carries a pair, one that carries a tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.helpers import Run, own_engine
from tests.engine.taps import PLACES


@pytest.fixture(params=["llama", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


@pytest.fixture(scope="session")
def tapped(engines: Any) -> Iterator[Any]:
    """An engine that serves ``PLACES`` from inside its compiled model."""
    with own_engine(engines, "llama", enforce_eager=False, max_num_seqs=16, taps=PLACES) as model:
        yield model


@pytest.fixture(scope="session")
def on_ranks(request: pytest.FixtureRequest) -> None:
    """For tests of two ranks, before an engine is asked for."""
    _require(request, "two-ranks")


@pytest.fixture(scope="session")
def on_stages(request: pytest.FixtureRequest) -> None:
    """For tests of two stages."""
    _require(request, "two-stages")


def _require(request: pytest.FixtureRequest, engine: str) -> None:
    if request.config.getoption("--engine") != engine:
        pytest.skip(f"is about {engine.replace('-', ' ')}")


@pytest.fixture(scope="session")
def tapped_on_ranks(on_ranks: None, engines: Any) -> Iterator[Any]:
    """The same on two ranks."""
    settings = {"tensor_parallel_size": 2, "enforce_eager": False, "max_num_seqs": 16, "taps": PLACES}
    with own_engine(engines, "llama", **settings) as model:
        yield model


@pytest.fixture(scope="session")
def in_worker(engines: Any) -> Iterator[Any]:
    """An engine that runs the model in a process of its own."""
    with own_engine(engines, "llama", engine="workers") as model:
        yield model


@pytest.fixture
def no_edits_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes edits off all engines of the session, and sees that nothing is held for any request."""
    yield
    for model in request.getfixturevalue("engines").made.values():
        model.clear_edits()
        assert model.edits() == []
        assert model.in_flight() == 0


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 100))
    loop.close()
