"""Blocks beside many requests on two stages of a pipeline run once, with the values that they have alone and on one:
`pytest --engine two-stages`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import insitu
from insitu import VLLM
from tests import models
from tests.engine.cohorts import alone_and_together, counted, same
from tests.engine.edits import tokens_of
from tests.engine.helpers import completed, enqueue, own_engine
from tests.engine.test_abort import before_steps
from tests.engine.test_cohorts_mixed import MANY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60, method="thread", func_only=True),
    pytest.mark.usefixtures("on_stages"),
]

STEPS = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
VECTOR = torch.linspace(-1, 1, 128)
OWN = torch.randn(len(MANY), 128, generator=torch.Generator().manual_seed(3))
ENGINE = {"max_num_seqs": 96, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 2**26}
"""More requests than tokens fit in a step, so that several steps are on their way."""

Block = Callable[[Any], Any]


@pytest.fixture(scope="module")
def model(on_stages: None, engines: Any) -> Iterator[VLLM]:
    with own_engine(engines, "llama", pipeline_parallel_size=2, **ENGINE) as model:
        yield model


@pytest.fixture(scope="module")
def one(on_stages: None) -> Iterator[VLLM]:
    """All layers in this process."""
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **ENGINE}
    with insitu.VLLM(models.tiny("llama"), dispatch=True, **settings) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left(model: VLLM) -> Iterator[None]:
    yield
    assert model.in_flight() == 0


def reads(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            found.append([model.embed[0], model.resid_post[0], model.attn_out[1][-1]])
            found.append((model.resid_mid[2][-1] * 2, model.model.layers[3].mlp.output, model.final_norm))
            found.append([model.logits[0], model.samples])
        return found

    return block


def edits_in_place(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.resid_post[1] += VECTOR
            model.mlp_out[2][-1] *= 1.5
            model.resid_post[3][:] -= 0.5
            found.append([model.final_norm, model.logits[0]])
        return found

    return block


def replacements(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.resid_post[0] = model.resid_post[0] * 0.5
            model.model.layers[2].mlp.output = model.model.layers[2].mlp.output + VECTOR
            model.attn_out[3] = model.attn_out[3] * 2
            found.append(model.resid_post[3][-1])
            model.logits = model.logits * 2
            found.append(model.logits)
        return found

    return block


def second_by_first(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        logits = []
        for _ in tracer.iter[:]:
            early = model.resid_post[0]
            model.resid_post[2] += 0.1 * early
            logits.append(model.logits[0])
        return logits

    return block


def first_by_second_in_the_next_step(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        seen = []
        kept = model.resid_post[3][-1].clone()
        for _ in tracer.iter[1:]:
            model.resid_post[0][-1] += kept
            kept = model.resid_post[3][-1].clone()
            seen.append(kept)
        return seen

    return block


def second_stage_once(model: VLLM) -> Block:
    def block(tracer: Any) -> Any:
        return [model.resid_post[3] @ VECTOR, model.final_norm.mean(0), model.logits.argmax(-1)]

    return block


BLOCKS = [
    reads, edits_in_place, replacements, second_by_first, first_by_second_in_the_next_step, second_stage_once,
]  # fmt: skip


@pytest.mark.parametrize("made", BLOCKS)
def test_a_block_runs_once_for_many(model: VLLM, one: VLLM, made: Callable[[VLLM], Block]) -> None:
    def work(engine: VLLM = model) -> Any:
        return engine.run(made(engine), MANY, **STEPS)

    with counted(model) as counts:
        alone, together = alone_and_together(model, work)
    assert not isinstance(together, BaseException), together
    assert same(alone, together)
    assert counts[0] >= len(MANY) - 3  # fewer than four that begin in a step are alone
    assert sum(counts) == 3 * len(MANY)
    assert same(together, work(one))


@pytest.mark.parametrize("early", [0, 1])
def test_the_reverse_is_refused_for_each_request(model: VLLM, early: int) -> None:
    def block(tracer: Any) -> None:
        late = model.resid_post[3]
        model.resid_post[early] += late

    alone, together = alone_and_together(model, lambda: model.run(block, MANY, **STEPS))
    assert same(alone, together)
    assert len(together.exceptions) == len(MANY)
    for error in together.exceptions:
        assert isinstance(error, insitu.OutOfOrderError)
        assert f".{early}.output` has gone by" in str(error)


def different_ends(model: VLLM) -> Any:
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, (prompt, vector) in enumerate(zip(MANY, OWN, strict=True)):
            with tracer.invoke(prompt, max_tokens=1 + number % 4):
                rows, total = [].save(), 0.0
                for _ in tracer.iter[:]:
                    model.resid_post[1][-1] += vector
                    total = model.resid_post[2][-1] + total
                    model.resid_post[3][:] *= 0.5
                    rows.append(model.logits[0])
                twice = (total * 2).save()
    return rows, twice  # pyright: ignore[reportPossiblyUnboundVariable]


def two_blocks_by_turns(model: VLLM) -> Any:
    """Rows of one lie between those of the other, at the same places."""
    with model.trace(**STEPS) as tracer:
        for number, prompt in enumerate(MANY):
            if number % 2:
                with tracer.invoke(prompt, max_tokens=3 + number % 3):
                    odd = [].save()
                    for _ in tracer.iter[:]:
                        model.resid_post[2][-1] *= 1.5
                        odd.append([model.resid_post[3], model.logits[0], model.samples])
            else:
                with tracer.invoke(prompt):
                    even = [].save()
                    for _ in tracer.iter[:]:
                        even.append([model.resid_post[1] * 2, model.resid_post[3][-1], model.samples])
    return odd, even  # pyright: ignore[reportPossiblyUnboundVariable]


def one_of_several_is_alone(model: VLLM) -> Any:
    """A block that has to be alone waits where the one of all others does."""
    with model.trace(**STEPS) as tracer:
        for number, prompt in enumerate(MANY):
            if number in (2, 11):
                with tracer.invoke(prompt):
                    own = [].save()
                    for _ in tracer.iter[:]:
                        own.append((model.resid_post[2].cumsum(0), tracer.tokens))
                        model.resid_post[3] *= 2.0
            else:
                with tracer.invoke(prompt):
                    others = [].save()
                    for _ in tracer.iter[:]:
                        others.append(model.resid_post[2])
                        model.resid_post[3] += 1.0
    return own, others  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("trace", [different_ends, two_blocks_by_turns, one_of_several_is_alone])
def test_many_invokes(model: VLLM, one: VLLM, trace: Callable[[VLLM], Any]) -> None:
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: trace(model))
    assert not isinstance(together, BaseException), together
    assert same(alone, together)
    assert counts[0] >= 8  # as many as begin in the first step
    assert same(together, trace(one))


def test_an_error_on_the_second_stage_is_each_requests_own(model: VLLM) -> None:
    three = torch.zeros(3)

    def work() -> Any:
        with model.trace(**STEPS) as tracer:
            for number, prompt in enumerate(MANY[:12]):
                with tracer.invoke(prompt):
                    kept = model.resid_post[1][-1].save()
                    if number % 3 == 2:
                        model.resid_post[3] + three
        return kept  # pyright: ignore[reportPossiblyUnboundVariable]

    alone, together = alone_and_together(model, work)
    assert same(alone, together)
    assert [error.invoke for error in together.exceptions] == [2, 5, 8, 11]
    assert same(*alone_and_together(model, lambda: model.run(lambda tracer: model.resid_post[2], MANY, **STEPS)))


@pytest.mark.parametrize("step", [1, 2, 4])
def test_requests_that_are_aborted_leave_the_others(model: VLLM, step: int) -> None:
    engine = model.vllm_entrypoint.llm_engine

    def abort(number: int) -> None:
        if number == step:
            names = sorted(engine.output_processor.request_states, key=lambda name: int(name.split("-")[0]))
            engine.abort_request([names[3], names[7]], internal=True)

    def block(tracer: Any) -> Any:
        return [(model.resid_post[1][-1], model.resid_post[3][-1], model.logits) for _ in tracer.iter[:]]

    def work() -> Any:
        with before_steps(model, abort):
            return model.run(block, MANY[:10], **STEPS)

    with counted(model) as counts:
        alone, together = alone_and_together(model, work)
    assert counts == [10, 20]
    assert [error.invoke for error in together.exceptions] == [3, 7]
    assert same(alone, together)


def test_beside_untraced_requests(model: VLLM, one: VLLM) -> None:
    ends = [1 + number % 7 for number in range(64)]
    untraced = [MANY[number % 24] for number in range(64)]
    enqueue(one, untraced, ends)
    plain = [tokens_of(each) for each in completed(one)]

    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            early = model.resid_post[1][-1]
            model.resid_post[2][:] += VECTOR
            found.append([early, model.resid_post[3], model.logits])
        return found

    def work() -> Any:
        enqueue(model, untraced[:32], ends[:32])
        enqueue(model, untraced[32:], ends[32:])
        found = model.run(block, MANY, **STEPS)
        assert [tokens_of(each) for each in completed(model)] == plain
        return found

    with counted(model) as counts:
        alone, together = alone_and_together(model, work)
    assert not isinstance(together, BaseException), together
    assert same(alone, together)
    assert counts[0] >= 8


def test_an_installed_edit_on_the_second_stage(model: VLLM) -> None:
    with model.edit() as (tracer, edit):
        seen = [].save()
        for _ in tracer.all():
            model.resid_post[2][:] += VECTOR
            seen.append(model.logits[0])

    def asked() -> Any:
        enqueue(model, MANY, [1 + number % 5 for number in range(len(MANY))])
        return [(tokens_of(each), each.saves["seen"]) for each in completed(model)]

    with counted(model) as counts:
        alone, together = alone_and_together(model, asked)
    edit.clear()
    assert not isinstance(together, BaseException), together
    assert same(alone, together)
    assert counts[0] >= len(MANY) - 3


def test_those_that_are_preempted_are_told(model: VLLM) -> None:
    def preempt(step: int) -> None:
        if step == 2:
            model.vllm_entrypoint.reset_prefix_cache(reset_running_requests=True)

    def work() -> Any:
        with before_steps(model, preempt):
            return model.run(lambda tracer: [model.resid_post[3][-1] for _ in tracer.iter[:]], MANY[:6], **STEPS)

    alone, together = alone_and_together(model, work)
    assert same(alone, together)
    assert [str(each)[:26] for each in together.exceptions] == ["this request was preempted"] * 6
