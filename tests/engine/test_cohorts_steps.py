"""Blocks that go on through many steps are run once a step for all requests that are in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from insitu import VLLM, NotReachedError
from tests.engine.cohorts import PROMPTS, alone_and_together, counted, same
from tests.engine.test_cohorts import trace_of
from tests.models import LAYERS

pytestmark = pytest.mark.usefixtures("several_threads")

STEPS = 5
GREEDY = {"temperature": 0.0, "max_tokens": STEPS}
WIDTH = 128


def reads_every_step(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        rows = []
        for _ in tracer.iter[:]:
            rows.append(model.resid_post[1][-1])
        return rows

    return block


def steers_every_step(model: VLLM) -> Callable[[Any], Any]:
    v = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))

    def block(tracer: Any) -> Any:
        logits = []
        for _ in tracer.all():
            model.resid_post[1][:] += v
            logits.append(model.logits[0])
        return logits

    return block


def adds_up(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        total = model.resid_post[0][-1].clone()
        for step in tracer.iter[1:]:
            total += model.resid_post[0][-1] / (step + 1)
            if step > 2:
                model.resid_post[2][-1] = total
        return total * 2

    return block


def moves_on(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        first = model.resid_post[1][-1]
        tracer.next()
        second = model.resid_post[1]
        model.model.layers[2].next()
        third = model.resid_post[2][0]
        return first + third, second

    return block


def some_steps(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        found = {}
        for step in tracer.iter[[0, 2, 3]]:
            found[step] = model.mlp_out[1], model.samples
        return found

    return block


BLOCKS = [reads_every_step, steers_every_step, adds_up, moves_on, some_steps]


@pytest.mark.parametrize("made", BLOCKS)
def test_steps_are_as_alone(llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]) -> None:
    work = lambda: llama.run(made(llama), PROMPTS, ignore_eos=True, **GREEDY)  # noqa: E731
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert not isinstance(together, BaseException), together
    assert same(alone, together)
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]


@pytest.mark.parametrize("made", [*BLOCKS])
@pytest.mark.slow
def test_requests_end_when_they_end(llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]) -> None:
    ends = [1, 3, 5, 2, 3, 4]

    def work() -> Any:
        stops = llama.run(
            lambda tracer: [llama.samples.clone() for _ in tracer.iter[:]], PROMPTS, ignore_eos=True, **GREEDY
        )
        ids = [int(each[end - 1]) for each, end in zip(stops, ends, strict=True)]
        return llama.run(made(llama), PROMPTS, stop_token_ids=ids, **GREEDY)

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert counts[0] == len(PROMPTS) * (1 + (counts[0] > len(PROMPTS)))
    assert same(alone, together)


def to_the_end(model: VLLM) -> Any:
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
            with tracer.invoke(prompt, max_tokens=1 + number % 4):
                rows, total = [].save(), 0.0
                for _ in tracer.iter[:]:
                    model.resid_post[1][-1] *= 1.5
                    total = model.resid_post[2][-1] + total
                    rows.append(model.logits[0])
                twice = (total * 2).save()
    return rows, twice  # pyright: ignore[reportPossiblyUnboundVariable]


def from_the_end(model: VLLM) -> Any:
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
            with tracer.invoke(prompt, max_tokens=2 + number % 2):
                last = [].save()
                for _ in tracer.iter[-1:]:
                    last.append(model.resid_post[1][-1])
    return last  # pyright: ignore[reportPossiblyUnboundVariable]


def past_the_end(model: VLLM) -> Any:
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt, max_tokens=2 + number % 2):
                rows = [].save()
                for _ in tracer.iter[:3]:
                    rows.append(model.resid_post[1][-1])
    return rows  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("trace", [to_the_end, from_the_end, past_the_end])
def test_requests_of_certain_lengths_are_one(llama: VLLM, trace: Callable[[VLLM], Any]) -> None:
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: trace(llama))
    assert same(alone, together)
    assert isinstance(together, BaseException) is (trace is past_the_end)
    assert counts[0] * 2 == counts[1]


READS = ["model.resid_post[{}]", "model.model.layers[{}].mlp.output", "model.attn_out[{}]"]
LINES = [
    "y = {x}[-1]", "z = {x}[0] * 2", "rows.append({x})", "{x}[:] += v", "{x} *= 1.5",
    "{x}[-1] = v", "{x}[-1] += w", "kept = {x}", "rows.append({x}[-1] + w)", "rows.append(step)", "total += {x}[-1]",
    "rows = rows[1:]", "old = {x}.clone()", "old += 1", "rows.append(old - {x}[-1])", "kept[:] -= v",
    "old = old + total",
]  # fmt: skip
LOOPS = ["tracer.iter[1:]", "tracer.iter[1:4]", "tracer.iter[[1, 2]]", "tracer.iter[1::2]", "tracer.iter[2:]"]
AFTER = ["rows.append(total * 3)", "last = old + 1", "rows.append(kept)", "last = (total - w).save()"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """The text of a block that goes through steps."""
    lines = ["rows = [].save()", "total = (model.resid_post[0][-1] * 1).save()", "old = total.clone()", "kept = total"]
    lines.append(f"for step in {draw(st.sampled_from(LOOPS))}:")
    for layer in sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=2))):
        under = draw(st.sampled_from(["", "", f"if step % 2 == {layer % 2}:"]))
        indent = "    " * (1 + bool(under))
        if under:
            lines.append(f"    {under}")
        read = draw(st.sampled_from(READS)).format(layer)
        lines.append(f"{indent}x = {read}")
        chosen = draw(st.lists(st.sampled_from(LINES), max_size=4))
        lines += [indent + line.format(x="x") for line in chosen]
    lines.append("    rows.append(model.logits[0])")
    lines += draw(st.lists(st.sampled_from(AFTER), max_size=2))
    return "\n".join(lines)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(), seed=st.integers(0, 9), stops=st.lists(st.integers(0, 400), max_size=60))
@pytest.mark.slow
def test_any_steps_leave_the_same(llama: VLLM, program: str, seed: int, stops: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(WIDTH, generator=generator) for _ in PROMPTS]
    shared = torch.randn(WIDTH, generator=generator)
    sampling = GREEDY | ({"stop_token_ids": stops} if stops else {"ignore_eos": True})
    traced = trace_of(program, ["rows", "total", "last"])

    def work() -> Any:
        return traced(llama, vectors, shared, sampling)

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    event(f"together: {counts[0]}, ended early: {bool(stops)}, failed: {type(together).__name__}")
    assert same(alone, together), program


def test_one_step_too_many_is_each_requests_error(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        return [llama.resid_post[1][-1] for _ in tracer.iter[0:4]]

    stop = [int(each) for each in llama.run(lambda tracer: llama.samples[0], PROMPTS[:1], **GREEDY)[0:1]]
    work = lambda: llama.run(block, PROMPTS, stop_token_ids=stop, **GREEDY)  # noqa: E731
    alone, together = alone_and_together(llama, work)
    errors = getattr(together, "exceptions", [together])
    assert {type(error) for error in errors} == {NotReachedError}
    assert same(alone, together)
