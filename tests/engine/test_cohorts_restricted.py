"""Restricted blocks that run once for many requests leave what they leave alone, and stop where they stop alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from insitu import VLLM, LimitError
from insitu.block import FunctionBlock
from insitu.engine.client.edit import Edit, EditTracer
from insitu.engine.job import Job
from insitu.guard import GuardedBlock, GuardLimits
from insitu.net import CodeSource
from insitu.net.form import parsed
from insitu.net.form_block import form_block
from tests.engine import remote
from tests.engine.cohorts import PROMPTS, alone_and_together, counted, same
from tests.engine.helpers import completed, enqueue
from tests.engine.remote import trace
from tests.engine.test_cohorts import programs, saved_in, trace_of

pytestmark = [pytest.mark.in_process, pytest.mark.usefixtures("no_edits_left", "several_threads")]

GREEDY = {"temperature": 0.0, "max_tokens": 2}
STEPS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
WIDTH = 128


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(model: VLLM, block: Callable[[Any], Any], limits: GuardLimits | None = None, **sampling: Any) -> list[Any]:
    """What a function leaves beside each prompt, or how it failed there."""
    tracing = remote.RemoteTrace(model, PROMPTS, {**GREEDY, **sampling}, limits)
    returned, error = tracing.run_function(block)
    found = list(returned or [None] * len(PROMPTS))
    for each in getattr(error, "exceptions", [error] if error is not None else []):
        found[each.invoke] = each
    return found


def both(model: VLLM, block: Callable[[Any], Any], limits: GuardLimits | None = None, **sampling: Any) -> list[Any]:
    """What a function leaves together, which is what it leaves alone."""
    alone, together = alone_and_together(model, lambda: run(model, block, limits, **sampling))
    assert same(alone, together)
    return together


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(), seed=st.integers(0, 9))
@pytest.mark.slow
def test_any_program_leaves_the_same(llama: VLLM, program: str, seed: int) -> None:
    vectors, shared = list(drawn(len(PROMPTS), WIDTH, seed=seed)), drawn(WIDTH, seed=seed + 10)
    traced, trusted = (trace_of(program, saved_in(program), tracing) for tracing in (trace, VLLM.trace))
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: traced(llama, vectors, shared, GREEDY))
    event(f"together: {counts[0]}, failed: {isinstance(together, BaseException)}")
    assert same(alone, together), program
    with counted(llama) as as_trusted:
        alone_and_together(llama, lambda: trusted(llama, vectors, shared, GREEDY))
    assert counts[0] == as_trusted[0], program


def test_a_block_with_steps_runs_once_for_all(llama: VLLM) -> None:
    vectors, mixes, layers = drawn(len(PROMPTS), WIDTH), drawn(WIDTH, 5), [1, 2]

    def work() -> Any:
        with trace(llama, **STEPS) as tracer:
            for number, (prompt, vector) in enumerate(zip(PROMPTS, vectors, strict=True)):
                with tracer.invoke(prompt, max_tokens=2 + number % 3):
                    seen = [].save()
                    for _ in tracer.iter[:]:
                        llama.resid_post[1][:] += vector
                        seen.append(torch.softmax(llama.resid_post[2][-1] @ mixes, -1))
                        seen.append([llama.mlp_out[3].norm(dim=-1) for _ in layers])
                    first = (seen[0] * 2).save()
        return seen, first  # pyright: ignore[reportPossiblyUnboundVariable]

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]


def test_heads_and_modules_places(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        hidden, residual = llama.model.layers[1].output
        return [hidden[-1] + residual[-1], llama.q[2][-1], llama.v[2], llama.logits]

    both(llama, block)
    with counted(llama) as counts:
        run(llama, block)
    assert counts == [len(PROMPTS), 0]


# -- what would tell --------------------------------------------------------------------------


def asks_for_the_kind(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: (isinstance(model.resid_post[1], torch.Tensor), hasattr(model.resid_post[1], "shape"))


def writes_it_down(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: f"{model.resid_post[1][-1, :2]} {str(model.resid_post[2])[:20]}"


def goes_by_its_value(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        hidden = model.resid_post[1]
        return hidden[-1] * 2 if hidden[-1].sum() > 0 else hidden.sum(0)

    return block


def goes_by_its_truth(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: 1 if model.resid_post[1].sum() else 2


def asks_for_its_shape(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: (model.resid_post[1].shape[0], len(model.resid_post[1]))


def looks_for_it(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        hidden = model.resid_post[1]
        return {hidden: 1}[hidden], hidden in [hidden], [hidden].index(hidden)

    return block


def catches(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        try:
            return model.resid_post[1].cumsum(0)
        except Exception:
            return 1

    return block


def makes_another(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: torch.zeros(3) + model.resid_post[1].sum()


NOT_TOGETHER = [
    asks_for_the_kind, writes_it_down, goes_by_its_value, goes_by_its_truth, asks_for_its_shape, looks_for_it, catches,
    makes_another,
]  # fmt: skip


@pytest.mark.parametrize("made", NOT_TOGETHER)
def test_what_would_tell_a_name_from_a_value_runs_alone(
    llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]
) -> None:
    with counted(llama) as counts:
        found = both(llama, made(llama))
    assert counts[0] == 0
    assert not any(isinstance(each, Exception) for each in found)


# -- limits -----------------------------------------------------------------------------------


def outer(model: VLLM, vector: torch.Tensor) -> Callable[[Any], Any]:
    return lambda tracer: (model.resid_post[1].unsqueeze(-1) * vector).sum()


def test_what_a_longer_companion_makes_fails_nobody_else(llama: VLLM) -> None:
    bytes_of = [len(prompt) * WIDTH * 1024 * 4 for prompt in PROMPTS]
    limits = GuardLimits(value_bytes=sorted(bytes_of)[2])
    found = both(llama, outer(llama, drawn(1024)), limits)
    assert [isinstance(each, LimitError) for each in found] == [size > limits.value_bytes for size in bytes_of]
    with counted(llama) as counts:
        run(llama, outer(llama, drawn(1024)))
    assert counts == [len(PROMPTS), 0]


def test_what_it_saves_is_counted_for_each(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        hidden = llama.resid_post[1]
        return [hidden, hidden * 2, hidden[-1], "text"]

    size = max(len(prompt) * WIDTH * 8 + WIDTH * 4 for prompt in PROMPTS)
    for saved_bytes, runs_together in ((size + 200, True), (size, False)):
        limits = GuardLimits(saved_bytes=saved_bytes)
        found = both(llama, block, limits)
        failed = [each for each in found if isinstance(each, LimitError)]
        said = f"this block was stopped: it saves more than {saved_bytes} bytes"
        assert [str(each) for each in failed] == ([] if runs_together else [said])
        with counted(llama) as counts:
            run(llama, block, limits)
        assert bool(counts[0]) is runs_together


def test_it_stops_after_as_many_operations_as_alone(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        return [llama.resid_post[layer].mean(0) * 2 for layer in (1, 2, 3)]

    least, most = 1, 1000
    while most - least > 1:
        middle = (least + most) // 2
        failed = any(isinstance(each, LimitError) for each in run(llama, block, GuardLimits(operations=middle)))
        least, most = (middle, most) if failed else (least, middle)
    for operations in (most - 1, most, most + 1, 2 * most, 4 * most, 20 * most):
        found = both(llama, block, GuardLimits(operations=operations))
        assert [isinstance(each, LimitError) for each in found] == [operations < most] * len(PROMPTS)
    with counted(llama) as counts:
        run(llama, block)
    assert counts == [len(PROMPTS), 0]


def test_work_that_may_take_long_is_timed_alone(llama: VLLM) -> None:
    mixes = drawn(WIDTH, WIDTH)

    def block(tracer: Any) -> Any:
        hidden = llama.resid_post[1]
        for _ in range(200):
            hidden = hidden @ mixes
        return hidden.sum(0)

    for seconds, runs_together in ((30.0, True), (0.02, False)):
        with counted(llama) as counts:
            run(llama, block, GuardLimits(seconds=seconds))
        assert bool(counts[0]) is runs_together


def test_a_loop_without_end_is_stopped_beside_each(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        hidden = llama.resid_post[1]
        while True:
            hidden[:] += 1

    for limits in (GuardLimits(operations=5000), GuardLimits(seconds=0.05)):
        with counted(llama) as counts:
            found = run(llama, block, limits)
        assert counts == [0, len(PROMPTS)]
        assert all(isinstance(each, LimitError) for each in found)
    both(llama, block, GuardLimits(operations=5000))


def test_what_it_raises_it_raises_beside_each(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        hidden = llama.resid_post[1]
        raise ValueError("as it stands here")

    def wrong(tracer: Any) -> Any:
        return llama.resid_post[1] + llama.logits

    for each in (block, wrong):
        found = both(llama, each)
        assert all(isinstance(error, (ValueError, RuntimeError)) for error in found)
        assert all(error.__traceback__ is not None for error in found)


def test_an_edit_of_the_wrong_shape_fails_as_alone(llama: VLLM) -> None:
    found = both(llama, lambda tracer: llama.resid_post[1][-1] * drawn(3))
    assert all(isinstance(each, Exception) for each in found)


# -- whose it is ------------------------------------------------------------------------------


def jobs_of(model: VLLM, traces: list[str]) -> list[tuple[Any, Job]]:
    """Requests of these traces, all with the same text for their block."""
    engine = model._running()
    block: Any = GuardedBlock(CodeSource("block.py", 1, "f", "f", " hidden = model.resid_post[1].save()"))
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(traces))]
    return [
        (
            engine.prepare(prompt, GREEDY),
            Job(f"{trace}{number}", block, {"model": model}, "<client>", trace=trace),
        )
        for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True))
    ]


@pytest.mark.parametrize(("traces", "together"), [("aaabbb", 0), ("abababab", 8), ("aaaabbb", 4), ("aaaaaaaa", 8)])
def test_only_those_of_one_trace_run_together(llama: VLLM, traces: str, together: int) -> None:
    llama._running().run(jobs_of(llama, list("abcdef")))
    with counted(llama) as counts:
        results = llama._running().run(jobs_of(llama, list(traces)))
    assert counts == [together, len(traces) - together]
    alone = [llama._running().run([one])[0].saves for one in jobs_of(llama, list(traces))]
    assert same([result.saves for result in results], alone)


def installed(model: VLLM, text: str, limits: GuardLimits, **values: Any) -> None:
    block: Any = GuardedBlock(CodeSource("edit.py", 1, "f", "f", text), limits)
    engine = model._running()
    given = {"model": model, "tracer": EditTracer(engine), **values}
    engine.install(Edit(engine, None), Job("", block, given, "<client>", fresh=True))


def beside(model: VLLM) -> Any:
    enqueue(model, PROMPTS, [2] * len(PROMPTS))
    return [(each.saves, each.error) for each in completed(model)]


def test_an_installed_edit_runs_once_for_all_of_a_step(llama: VLLM) -> None:
    text = " for _ in tracer.iter[:]:\n  model.resid_post[1][:] += v\n  last = model.logits[0].save()"
    installed(llama, text, GuardLimits(), v=drawn(WIDTH))
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: beside(llama))
    assert same(alone, together)
    assert counts[0] == len(PROMPTS)


def test_an_installed_edit_saves_no_more_than_it_may(llama: VLLM) -> None:
    limits = GuardLimits(saved_bytes=4 * WIDTH * 5 + 16)
    installed(llama, " hidden = model.resid_post[1].save()", limits)
    alone, together = alone_and_together(llama, lambda: beside(llama))
    assert same(alone, together)
    assert [isinstance(error, LimitError) for _, error in together] == [len(prompt) > 5 for prompt in PROMPTS]


# -- forms ------------------------------------------------------------------------------------

UNIT = drawn(WIDTH).tolist()
READ = {"do": "read", "at": "resid_post[3]", "as": "after", "when": "all"}
FORMS = {
    "reads": [READ, {"do": "read", "at": "logits", "as": "logits", "positions": "last", "when": [0, 2]}],
    "adds": [{"do": "add", "at": "resid_post[1]", "vector": UNIT, "scale": 2.0, "when": "all"}, READ],
    "adds its norm": [{"do": "add", "at": "mlp_out[1]", "vector": UNIT, "match_norm": True, "positions": "last"}, READ],
    "sets": [{"do": "set", "at": "resid_post[1]", "vector": UNIT, "when": "generated"}, READ],
    "sets its norm": [{"do": "set", "at": "resid_mid[1]", "vector": UNIT, "match_norm": True, "when": "all"}, READ],
    "projects out": [{"do": "project_out", "at": "resid_post[2]", "vector": UNIT, "when": "all"}, READ],
    "scales": [{"do": "scale", "at": "attn_out[2]", "scale": 0.25, "positions": "last", "when": "all"}, READ],
}
ALONE = {
    "heads": [{"do": "scale", "at": "q[2]", "scale": 0.25, "positions": [0]}, READ],
    "numbers": [{"do": "scale", "at": "attn_out[2]", "scale": 0.25, "positions": [0, -1]}, READ],
    "too short": [{"do": "add", "at": "resid_post[1]", "vector": [1.0], "when": "all"}, READ],
    "too many steps": [{"do": "read", "at": "resid_post[1]", "as": "x", "when": [0, 9]}],
}


def form_of(model: VLLM, actions: list[Any], saved_bytes: int | None = None) -> Callable[[], list[tuple[Any, Job]]]:
    block, engine = form_block(parsed({"actions": actions}), model, saved_bytes), model._running()
    calls = itertools.count()

    def jobs() -> list[tuple[Any, Job]]:
        call = f"call {next(calls)}"
        made = [
            Job(f"{call}/{number}", FunctionBlock(block), tracer=EditTracer(engine), trace=call) for number in range(6)
        ]
        return [(engine.prepare(prompt, STEPS), job) for prompt, job in zip(PROMPTS, made, strict=True)]

    return jobs


def left(model: VLLM, work: list[tuple[Any, Job]]) -> list[Any]:
    return [result.error or result.returned for result in model._running().run(work)]


@pytest.mark.parametrize("name", [*FORMS, *ALONE])
def test_a_form_leaves_the_same(llama: VLLM, name: str) -> None:
    jobs = form_of(llama, (FORMS | ALONE)[name])
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: left(llama, jobs()))
    assert same(alone, together)
    assert counts[0] == (len(PROMPTS) if name in FORMS else 0)
    assert any(isinstance(each, Exception) for each in together) is name.startswith("too")


def test_a_form_reads_no_more_than_it_may(llama: VLLM) -> None:
    jobs = form_of(llama, [{"do": "read", "at": "resid_post[1]", "as": "x"}], 4 * WIDTH * 5)
    alone, together = alone_and_together(llama, lambda: left(llama, jobs()))
    assert same(alone, together)
    assert [isinstance(each, LimitError) for each in together] == [len(prompt) > 5 for prompt in PROMPTS]


def test_an_installed_form_runs_once_for_all_of_a_step(llama: VLLM) -> None:
    engine = llama._running()
    block = FunctionBlock(form_block(parsed({"actions": FORMS["adds"][:1]}), llama))
    engine.install(Edit(engine, None), Job("", block, tracer=EditTracer(engine)))

    def texts() -> Any:
        enqueue(llama, PROMPTS, [6] * len(PROMPTS))
        return [list(each.outputs[0].token_ids) for each in completed(llama)]

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, texts)
    assert same(alone, together)
    assert counts[0] == len(PROMPTS)
