"""What restricted blocks do once their requests are over, and what is saved more than once, is as alone."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

from insitu import VLLM, LimitError
from insitu.guard import GuardLimits
from tests.engine.cohorts import PROMPTS, alone_and_together, counted, same
from tests.engine.remote import trace
from tests.engine.test_cohorts_restricted import run

pytestmark = [pytest.mark.in_process, pytest.mark.usefixtures("no_edits_left", "several_threads")]

STEPS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


TAILS = {
    "a number": "left = float(n) if n < 3 else None",
    "a text": "left = str(n) if n < 3 else None",
    "an error": "left = None if n >= 3 else sum(['too short'])",
    "a long loop": "left = sum([1 for _ in range(80000 if n < 3 else 1)])",
    "what has no rule": "left = rows[0].cumsum(0) if n < 3 else None",
}


def reads_then(model: VLLM, tail: str) -> Callable[[Any], Any]:
    """A block that reads at each step, and does this at the end."""
    text = (
        "def block(tracer):\n    n, rows = 0, []\n    for _ in tracer.iter[:]:\n"
        f"        rows.append(model.resid_post[1][-1])\n        n += 1\n    {tail}\n    return rows, left\n"
    )
    file = f"<block {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"model": model}
    exec(compile(text, file, "exec"), namespace)
    return namespace["block"]


def stops(model: VLLM) -> list[int]:
    """Tokens after which some of the prompts end early."""
    found = model.run(lambda tracer: [model.samples.clone() for _ in tracer.iter[:]], PROMPTS, **STEPS)
    return sorted({int(each[1]) for each in found[:3]})


@pytest.mark.parametrize("tail", TAILS)
def test_requests_that_may_end_early_end_as_alone(llama: VLLM, tail: str) -> None:
    block, sampling = reads_then(llama, TAILS[tail]), {**STEPS, "stop_token_ids": stops(llama)}
    alone, together = alone_and_together(llama, lambda: run(llama, block, **sampling))
    assert same(alone, together)


def test_those_whose_end_needs_nothing_still_run_once(llama: VLLM) -> None:
    block, sampling = reads_then(llama, "left = len(rows)"), {**STEPS, "stop_token_ids": stops(llama)}
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: run(llama, block, **sampling))
    assert same(alone, together)
    assert len({len(rows) for rows, _ in together}) > 1
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]


def test_work_on_what_the_caller_gave_takes_its_time_alone_too(llama: VLLM) -> None:
    given = torch.ones(2000)

    def work() -> Any:
        with trace(llama, limits=GuardLimits(seconds=0.5), **STEPS) as tracer:
            for number, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt, max_tokens=2 + number % 2 * 2):
                    n = 0
                    for _ in tracer.iter[:]:
                        row = llama.resid_post[1][-1].save()
                        n += 1
                    if n < 3:
                        large = given[:, None] * given
                        for _ in range(3000):
                            large = large + 1
        return row  # pyright: ignore[reportPossiblyUnboundVariable]

    with pytest.raises(BaseException, match="invokes failed") as failed:
        work()
    errors: Any = getattr(failed.value, "exceptions", ())
    assert len(errors) == (len(PROMPTS) + 1) // 2
    assert all(isinstance(error, LimitError) for error in errors)


def test_all_rows_of_a_value_are_a_tensor_of_their_own(llama: VLLM) -> None:
    def block(tracer: Any) -> Any:
        stream = llama.resid_post[1]
        return [stream[:] for _ in range(50)]

    for limits in (None, GuardLimits(saved_bytes=20_000)):
        alone, together = alone_and_together(llama, lambda limits=limits: run(llama, block, limits))
        assert same(alone, together)
    assert all(isinstance(each, LimitError) for each in together)


def test_trusted_blocks_are_told_of_no_missing_function(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**STEPS) as tracer:
            for number, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt, max_tokens=2 + number % 2 * 2):
                    n = 0
                    for _ in tracer.iter[:]:
                        row = llama.resid_post[1][-1].save()
                        n += 1
                    left = (float(n) if n < 3 else n).save()
        return row, left  # pyright: ignore[reportPossiblyUnboundVariable]

    alone, together = alone_and_together(llama, work)
    assert same(alone, together)
