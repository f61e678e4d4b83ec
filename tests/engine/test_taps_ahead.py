"""Blocks that need no values run ahead of their requests, and nothing shows it but the speed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import insitu
from insitu.block import LocationError
from insitu.run import warning_handlers
from tests.engine.taps import PROMPTS, SETTINGS, Block, assert_same, name_of, recorded, taps_of

pytestmark = [pytest.mark.slow, pytest.mark.in_process]


@pytest.fixture(scope="module", autouse=True)
def far_ahead(tapped: Any) -> Iterator[None]:
    """As if there were a GPU that works meanwhile."""
    ahead = taps_of(tapped).shown.__self__.ahead
    most, ahead.most = ahead.most, 8
    yield
    ahead.most = most


@pytest.fixture(params=["between pieces", "recorded"])
def model(request: pytest.FixtureRequest, tapped: Any) -> Iterator[Any]:
    with recorded(tapped) if request.param == "recorded" else nullcontext():
        yield tapped


def change_what_was_added(model: Any, tracer: Any) -> Any:
    seen, vector = [], None
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        vector = torch.linspace(-3, 3, stream.shape[-1]).to(stream) if vector is None else vector
        stream += vector
        vector *= -0.5
        seen += [model.resid_post[2], model.logits]
    return seen


def edit_what_was_left_behind(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        first, second = model.resid_post[0], model.resid_post[2]
        first += 1
        seen += [first, second, model.logits]
    return seen


def keep_copies(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        seen.append(model.resid_post[1].clone())
        model.resid_post[1] += 1
        seen += [model.resid_post[1], model.resid_post[2].clone(), model.resid_post[3][-1]]
    return seen


def look_back(model: Any, tracer: Any) -> Any:
    rows, seen = [], []
    for step in tracer.iter[:]:
        rows.append(model.resid_post[3])
        if step == 3:
            seen.append(rows[1] * 2)
            rows[2] += 1
            seen.append(model.logits)
    return rows, seen


def end_early(model: Any, tracer: Any) -> Any:
    return [model.resid_post[3] for _ in tracer.iter[:4]], [model.resid_post[3] for _ in tracer.iter[4:]]


def ask_what_was_drawn(model: Any, tracer: Any) -> Any:
    seen = []
    for step in tracer.iter[:]:
        seen.append(model.resid_post[3])
        if step == 2:
            seen.append(torch.tensor([float(len(tracer.tokens))]))
    return seen


def edit_what_is_there_and_what_is_not(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        first, second, third = model.resid_post[0], model.resid_post[2], model.resid_post[3]
        second *= 2
        third += first
        third *= 0.5
        seen += [first, second.clone(), third, model.logits]
    return seen


def add_the_parts(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        hidden, residual = model.model.layers[1].output
        seen += [hidden + residual, hidden, model.resid_post[3]]
    return seen


def look_inside_a_function(model: Any, tracer: Any) -> Any:
    """Each waits inside a function of torch's, which keeps a handler of warnings on its stack."""
    seen = []
    for step in tracer.iter[:]:
        stream = model.resid_post[1]
        stream += 1
        if step > 3:
            seen += [torch.stack([stream, stream]), torch.add(model.resid_post[2], 1)]
        seen.append(model.logits)
    return seen


def copy_past_torch(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        seen += [torch.tensor(model.resid_post[0]), torch.ops.aten.add(model.resid_post[1], 1), model.logits]
    return seen


def turn_after_some_steps(model: Any, tracer: Any) -> Any:
    """The edit that is known stops, another begins, and then the block leaves the taps."""
    seen = []
    for step in tracer.iter[:]:
        if step < 4:
            model.resid_post[1] += 2
        elif step < 6:
            model.resid_post[2][:, ::2] = 0
        else:
            seen.append(model.model.layers[2].mlp.down_proj.output[0])
        seen += [model.resid_post[3], model.logits]
    return seen


AHEAD = [
    change_what_was_added, edit_what_was_left_behind, edit_what_is_there_and_what_is_not, keep_copies, look_back,
    end_early, add_the_parts, look_inside_a_function, turn_after_some_steps,
]  # fmt: skip


@pytest.mark.parametrize("block", [*AHEAD, ask_what_was_drawn, copy_past_torch], ids=name_of)
@pytest.mark.parametrize("count", [3, 14])
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_blocks_that_run_ahead_of_their_requests(model: Any, llama: Any, block: Block, count: int) -> None:
    prompts = [[*PROMPTS[i % 4], 10 + i] for i in range(count)]
    settings = {**SETTINGS, "max_tokens": 9}
    for _ in range(2):
        ours, wanted = [each.run(functools.partial(block, each), prompts, **settings) for each in (model, llama)]
        assert_same(ours, wanted, block.__name__)
    assert warning_handlers.present() == warning_handlers.OF_NOBODY


@pytest.mark.parametrize("step", [3, 7])
def test_what_ends_a_request_ends_it_in_its_own_step(model: Any, step: int) -> None:
    def stop(tracer: Any) -> Any:
        rows = []
        for number in tracer.iter[:]:
            rows.append(model.resid_post[3])
            if number == step:
                tracer.stop()
        return rows, tracer.result

    def fail(tracer: Any) -> None:
        for number in tracer.iter[:]:
            insitu.save(model.resid_post[3])
            if number == step:
                raise ZeroDivisionError

    settings = {**SETTINGS, "max_tokens": 12}
    for _ in range(2):
        rows, result = model.run(stop, PROMPTS[0], **settings)
        assert len(rows) == len(result.outputs[0].token_ids) == step + 1
        assert all(row.isfinite().all() for row in rows)
        with pytest.raises(ZeroDivisionError):
            model.run(fail, PROMPTS[0], **settings)
    assert model.in_flight() == 0


def test_an_operator_that_can_not_wait_says_so(tapped: Any) -> None:
    add = torch.ops.aten.add

    def block(tracer: Any) -> Any:
        return [add(tapped.resid_post[1], 1) if step > 1 else tapped.resid_post[1] for step in tracer.iter[:]]

    with pytest.raises(LocationError, match=r"was given a value that the forward has not computed yet"):
        tapped.run(block, PROMPTS[0], **SETTINGS)
    assert tapped.in_flight() == 0


def add_and_keep(model: Any, tracer: Any) -> Any:
    rows = []
    for _ in tracer.iter[:]:
        model.resid_post[1] += 1
        rows.append(model.resid_post[3])
    return rows, tracer.result


def test_a_token_that_ends_the_request_ends_the_block(model: Any, llama: Any) -> None:
    settings = {"temperature": 0.0, "max_tokens": 12}
    _, whole = llama.run(functools.partial(add_and_keep, llama), PROMPTS[0], ignore_eos=True, **settings)
    tokens = list(whole.outputs[0].token_ids)
    last = tokens.index(tokens[6])
    for _ in range(2):
        block = functools.partial(add_and_keep, model)
        rows, result = model.run(block, PROMPTS[0], stop_token_ids=[tokens[6]], **settings)
        assert list(result.outputs[0].token_ids) == tokens[: last + 1]
        assert len(rows) == last + 1
    assert model.in_flight() == 0


@pytest.mark.parametrize("step", [2, 5])
def test_aborted_while_their_blocks_are_ahead(model: Any, llama: Any, step: int) -> None:
    prompts = [[*PROMPTS[i % 4], 10 + i] for i in range(4)]
    settings = {**SETTINGS, "max_tokens": 12}
    model.run(functools.partial(add_and_keep, model), prompts[0], **settings)
    engine = model.vllm_entrypoint.llm_engine
    core, calls = engine.engine_core, []

    def get_output() -> Any:
        calls.append(step)
        if len(calls) == step + 1:
            engine.abort_request(list(engine.output_processor.request_states)[:2], internal=True)
        return type(core).get_output(core)

    core.get_output = get_output
    try:
        with pytest.raises(BaseExceptionGroup):  # noqa: F821
            model.run(functools.partial(add_and_keep, model), prompts, **settings)
    finally:
        del core.get_output
    assert model.in_flight() == 0
    ahead = taps_of(model).shown.__self__.ahead
    ours, wanted = [each.run(functools.partial(add_and_keep, each), prompts, **settings) for each in (model, llama)]
    assert_same([rows for rows, _ in ours], [rows for rows, _ in wanted], "afterwards")
    assert not ahead.now
    assert not ahead._coming
    assert ahead._bytes == 0
