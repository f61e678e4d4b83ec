"""Blocks that are run once for many while requests come, go and fail: what each leaves is what it would leave alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from insitu import VLLM
from tests.engine.cohorts import PROMPTS, alone_and_together, at_hand, counted, host_of, same
from tests.engine.edits import steer, tokens_of
from tests.engine.helpers import completed, enqueue
from tests.engine.test_abort import before_steps

pytestmark = pytest.mark.usefixtures("no_edits_left", "several_threads")

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
_DRAWN = random.Random(0)
MANY = [[_DRAWN.randrange(5, 200) for _ in range(_DRAWN.randrange(2, 9))] for _ in range(24)]


def test_two_cohorts_whose_requests_take_turns(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for number, prompt in enumerate(MANY):
                if number % 2:
                    with tracer.invoke(prompt, max_tokens=3 + number % 3):
                        odd = [].save()
                        for _ in tracer.iter[:]:
                            llama.resid_post[1][-1] *= 1.5
                            odd.append(llama.logits[0])
                else:
                    with tracer.invoke(prompt):
                        even = [].save()
                        for _ in tracer.iter[:]:
                            even.append(llama.resid_post[0] * 2)
        return odd, even  # pyright: ignore[reportPossiblyUnboundVariable]

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert counts[0] >= 8  # as many as begin in the first step


@pytest.mark.parametrize("saving", [False, True])
def test_an_edit_beside_many_requests(llama: VLLM, saving: bool) -> None:
    v = torch.randn(128, generator=torch.Generator().manual_seed(2))
    if saving:
        with llama.edit() as (tracer, _):
            seen = [].save()
            for _ in tracer.all():
                llama.resid_post[1][:] += v
                seen.append(llama.logits[0])
    else:
        steer(llama, v)

    def asked() -> Any:
        enqueue(llama, PROMPTS, [5, 3, 4, 5, 2, 5])
        return [(tokens_of(each), getattr(each, "saves", {}).get("seen")) for each in completed(llama)]

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, asked)
    assert same(alone, together)
    assert counts[0] == len(PROMPTS)


def test_a_request_that_is_aborted_leaves_the_others(llama: VLLM) -> None:
    engine = llama.vllm_entrypoint.llm_engine

    def abort(step: int) -> None:
        if step == 2:
            engine.abort_request([list(engine.output_processor.request_states)[2]], internal=True)

    def work() -> Any:
        with before_steps(llama, abort):
            return llama.run(lambda tracer: [llama.resid_post[1][-1] for _ in tracer.iter[:]], PROMPTS, **GREEDY)

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert together.invoke == 2
    assert same(alone, together)
    assert counts[0] == len(PROMPTS)
    if at_hand(llama):
        assert not host_of(llama).company.all


def test_those_that_are_preempted_are_told(llama: VLLM) -> None:
    llm = llama.vllm_entrypoint

    def preempt(step: int) -> None:
        if step == 2:
            llm.reset_prefix_cache(reset_running_requests=True)

    def work() -> Any:
        with before_steps(llama, preempt):
            return llama.run(lambda tracer: [llama.resid_post[1][-1] for _ in tracer.iter[:]], PROMPTS, **GREEDY)

    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert [str(each)[:26] for each in together.exceptions] == ["this request was preempted"] * len(PROMPTS)
    assert counts[0] == len(PROMPTS)


@pytest.mark.in_process
def test_what_changes_meanwhile_is_told(llama: VLLM) -> None:
    layers = [0, 1]
    for place in (0, 1, 2):
        llama.run(lambda tracer, place=place: llama.mlp_out[place], PROMPTS[:1], **GREEDY)
    with (
        pytest.raises(BaseException, match="6 of 6 invokes failed") as told,
        before_steps(llama, lambda step: layers.append(2) if step == 2 else None),
    ):
        llama.run(
            lambda tracer: [[llama.mlp_out[each][-1] for each in layers] for _ in tracer.iter[:]], PROMPTS, **GREEDY
        )
    assert all("has changed since it began" in str(each) for each in told.value.exceptions)  # type: ignore[attr-defined]
    assert llama.in_flight() == 0
