"""Requests aborted at every moment of their lives: nothing of them stays, and later ones are right."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import insitu
from tests.engine.helpers import assert_close, assert_greedy, hf_stream, ids_of, own_engine, plain

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

PLACES, TOKENS = 4, 5
PROMPTS = [ids_of("llama", f"{text} {word}") for text in ("one", "the end", "a b") for word in "pqrstu"]
# Which step is about to be made when it happens; of the first four requests the last step is the fifth.
MOMENTS = {"before the first step": 0, "after prefill": 1, "in decode": 3, "before the last step": 4, "at the end": 5}


@pytest.fixture(scope="module")
def model(engines: Any) -> Iterator[Any]:
    with own_engine(engines, "llama", max_num_seqs=PLACES) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_left(model: Any) -> Iterator[None]:
    yield
    engine = model.vllm_entrypoint.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    runner = engine.model_executor.driver_worker.worker.model_runner
    assert model.in_flight() == 0
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.request_states
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    ids = ids_of("llama", "hello there")
    with model.trace(ids, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        resid = model.resid_post[2].save()
        result = tracer.result.save()
    assert_close(resid, hf_stream("llama", ids).resid_post[2])
    assert_greedy("llama", ids, list(result.outputs[0].token_ids))
    plain(model, [ids], max_tokens=1)  # the worker hears of requests that have ended in the step that follows
    assert not scheduler._reserved
    assert len(runner.requests) == 1
    assert scheduler.kv_cache_manager.usage == 0
    assert not [path for path, module in runner.get_model().named_modules() if "forward" in module.__dict__]


@contextmanager
def before_steps(model: Any, act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` before each step of the engine, with its number."""
    core = model.vllm_entrypoint.llm_engine.engine_core
    numbers = itertools.count()

    def get_output() -> Any:
        act(next(numbers))
        return type(core).get_output(core)

    core.get_output = get_output
    try:
        yield
    finally:
        del core.get_output


def traced(model: Any, ended: dict[int, list[int]]) -> None:
    """A block that reads and edits at each step of each request, and puts into `ended` what was drawn."""
    note = ended.__setitem__
    with model.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        for i, ids in enumerate(PROMPTS):
            with tracer.invoke(ids):
                for _ in tracer.iter[:]:
                    model.resid_post[1][:] *= 1.01
                note(i, list(tracer.result.outputs[0].token_ids))


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    traced(model, found)
    assert len(found) == len(PROMPTS)
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_some_are_aborted_while_others_run_and_wait(model: Any, undisturbed: dict[int, list[int]], moment: str) -> None:
    """Of those that are left at that moment, the second, the third and the last one."""
    engine = model.vllm_entrypoint.llm_engine
    states = engine.output_processor.request_states
    begun = list[str]()
    gone = set[int]()

    def act(step: int) -> None:
        if step == 0:
            begun.extend(states)
        if step == MOMENTS[moment]:
            left = list(states)
            chosen = [left[1], left[2], left[-1]]
            gone.update(map(begun.index, chosen))
            engine.abort_request(chosen, internal=True)

    found: dict[int, list[int]] = {}
    with pytest.raises(BaseExceptionGroup) as caught, before_steps(model, act):  # noqa: F821
        traced(model, found)
    assert {error.invoke for error in caught.value.exceptions} == gone
    assert len(gone) == 3
    assert all("aborted" in str(error) for error in caught.value.exceptions)
    assert found == {i: tokens for i, tokens in undisturbed.items() if i not in gone}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_at_any_moment(model: Any, moment: str) -> None:
    def act(step: int) -> None:
        if step == MOMENTS[moment]:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), before_steps(model, act):
        traced(model, {})


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["the prompt", "a later step", "the last step", "the result"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_block_that_raises_where_it_is(model: Any, place: str, kind: type[BaseException]) -> None:
    step = {"the prompt": 0, "a later step": 2, "the last step": TOKENS - 1}.get(place)
    with pytest.raises(kind):
        with model.trace(temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
            for i, ids in enumerate(PROMPTS[:6]):
                with tracer.invoke(ids):
                    for now in tracer.iter[:]:
                        model.resid_post[1][:] *= 1.01
                        if i == 3 and now == step:
                            raise kind
                    if i == 3:
                        tracer.result
                        raise kind


@pytest.mark.parametrize("at", ["prefill", "decode", "logits", "last"])
def test_a_request_aborted_from_inside_its_own_step(model: Any, at: str) -> None:
    engine = model.vllm_entrypoint.llm_engine
    with pytest.raises(insitu.RequestError, match="aborted"):
        with model.trace(PROMPTS[0], temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                hidden = model.resid_post[1]
                if at == "logits":
                    model.logits
                if step == {"decode": 2, "last": TOKENS - 1}.get(at, 0):
                    engine.abort_request(list(engine.output_processor.request_states), internal=True)
                torch.relu(hidden)


def test_all_are_aborted_before_any_is_scheduled(model: Any) -> None:
    engine = model.vllm_entrypoint.llm_engine

    def act(step: int) -> None:
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    with pytest.raises(BaseExceptionGroup) as caught, before_steps(model, act):  # noqa: F821
        traced(model, {})
    assert len(caught.value.exceptions) == len(PROMPTS)
