"""What is not finite in an edited request stays with it, wherever its memory goes afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from insitu.engine.worker.leftover import Leftover
from tests.engine.cohorts import host_of
from tests.engine.helpers import own_engine, plain

PROMPTS = [[5, 90, 33, 400, 17], [31, 7, 7, 12, 9, 250, 8], [44], [6, 300, 21]]
SETTINGS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def model(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    """Its KV cache has room for few requests, so that they soon get what others have left."""
    with own_engine(engines, "llama", num_gpu_blocks_override=6, enable_prefix_caching=request.param) as model:
        yield model


def tokens(model: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in plain(model, PROMPTS, **SETTINGS)]


def spoiling(model: Any, value: float) -> Callable[[Any], Any]:
    """A block that leaves this in the KV cache, and returns what the logits come to."""

    def spoil(tracer: Any) -> Any:
        for _ in tracer.iter[:]:
            model.resid_post[1][:] = value
            logits = model.logits
        return logits

    return spoil


@pytest.mark.parametrize("count", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_later_requests_are_as_they_were(model: Any, count: int, value: float) -> None:
    before = tokens(model)
    for _ in range(3):
        spoilt = model.run(spoiling(model, value), PROMPTS[:count], **SETTINGS)
        assert all(logits.isnan().all() for logits in spoilt)
        assert tokens(model) == before


@pytest.mark.in_process
@pytest.mark.parametrize("count", [1, 4], ids=["alone", "together"])
def test_the_scheduler_is_told_once_of_each(model: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    note = Leftover.note

    def noted(self: Leftover, requests: Sequence[str]) -> None:
        told.extend(requests)
        note(self, requests)

    monkeypatch.setattr(Leftover, "note", noted)

    def double(tracer: Any) -> Any:
        for step in tracer.iter[:]:
            if step:
                model.resid_post[1][:] *= 2

    for _ in range(2):
        model.run(double, PROMPTS[:count], **SETTINGS)
    assert len(told) == len(set(told)) == 2 * count
    assert not host_of(model)._edited


def test_an_edit_that_is_taken_back_before_the_logits_leaves_nothing(model: Any) -> None:
    def spoil(tracer: Any) -> Any:
        for _ in tracer.iter[:]:
            kept = model.resid_post[0].clone()
            model.resid_post[1][:] = float("nan")
            model.resid_post[2][:] = kept
            logits = model.logits
        return logits

    before = tokens(model)
    for _ in range(3):
        (logits,) = model.run(spoil, [PROMPTS[1]], **SETTINGS)
        assert logits.isfinite().all()
        assert tokens(model) == before
