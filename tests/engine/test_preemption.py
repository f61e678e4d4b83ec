"""A KV cache too small for its requests: traced ones are not preempted, so that their values are those of a
roomy one. Untraced ones beside them may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from vllm import SamplingParams

import insitu
from tests.engine.helpers import assert_close, completed, enqueue, ids_of, own_engine, plain

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

BLOCK, BLOCKS = 32, 10  # 9 for requests: 288 tokens
PROMPTS = [ids_of("llama", text) for text in ("a b c d", "the end", "one two three", "hello there", "x y", "Rome")]
TOKENS = 90  # with its prompt each needs 3 or 4 blocks, and begins with one


@pytest.fixture(scope="module")
def small(engines: Any) -> Iterator[Any]:
    settings = {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 8}
    with own_engine(engines, "llama", **settings) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left(small: Any) -> Iterator[None]:
    yield
    scheduler = scheduler_of(small)
    assert small.in_flight() == 0
    assert not scheduler.requests
    plain(small, [PROMPTS[0]], max_tokens=1)
    assert not scheduler._reserved


def scheduler_of(model: Any) -> Any:
    return model.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler


def preempted(model: Any) -> list[bool]:
    """Grows by an entry for each preemption from now on: whether the request was a traced one."""
    scheduler, seen = scheduler_of(model), []
    original = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(bool(request.sampling_params.extra_args))
        original(request, *args, **kwargs)

    scheduler._preempt_request = noted
    return seen


def traced(model: Any, prompts: list[list[int]], tokens: int) -> tuple[list[Any], list[Any], list[Any]]:
    """A read and an edit at every step: each step's stream, the logits after the edit, the result."""
    with model.trace(temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
        for ids in prompts:
            with tracer.invoke(ids):
                stream, logits = [].save(), [].save()
                for step in tracer.iter[:]:
                    stream.append(model.resid_post[1])
                    model.resid_post[1][:] *= 1 + 0.01 * (step % 7)
                    logits.append(model.logits)
                result = tracer.result.save()
    return stream, logits, result


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def roomy(llama: Any) -> Any:
    return traced(llama, PROMPTS, TOKENS)


def assert_same(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(torch.cat(mine), torch.cat(other))
    assert [tokens_of(one) for one in found[2]] == [tokens_of(one) for one in wanted[2]]


def test_six_long_requests_have_the_values_of_a_roomy_cache(small: Any, roomy: Any) -> None:
    seen = preempted(small)
    assert_same(traced(small, PROMPTS, TOKENS), roomy)
    assert seen == []
    text = [output.outputs[0].text for output in roomy[2]]
    assert len(set(text)) == len(PROMPTS)


def test_untraced_requests_beside_them_are_the_ones_preempted(small: Any, llama: Any, roomy: Any) -> None:
    wanted = [tokens_of(one) for one in plain(llama, PROMPTS, max_tokens=TOKENS, ignore_eos=True)]
    seen = preempted(small)
    enqueue(small, PROMPTS, [TOKENS] * len(PROMPTS))
    assert_same(traced(small, PROMPTS, TOKENS), roomy)
    assert [tokens_of(one) for one in completed(small)] == wanted
    assert seen
    assert not any(seen)


def test_untraced_requests_that_come_while_a_block_runs(
    small: Any, roomy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = preempted(small)
    loop, steps = small._engine._loop, itertools.count()
    step_of_vllm = loop._step

    def step_and_arrival() -> list[Any]:
        outputs = step_of_vllm()
        if next(steps) == 2:
            enqueue(small, PROMPTS * 2, [TOKENS] * 2 * len(PROMPTS))
        return outputs

    monkeypatch.setattr(loop, "_step", step_and_arrival)
    with small.trace(PROMPTS[0], temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as tracer:
        stream = [].save()
        for step in tracer.iter[:]:
            stream.append(small.resid_post[1])
            small.resid_post[1][:] *= 1 + 0.01 * (step % 7)
    completed(small)
    assert next(steps) > TOKENS
    assert_close(torch.cat(stream), torch.cat(roomy[0][0]))
    assert not any(seen)


def test_requests_without_a_bound_run_one_after_the_other_while_their_blocks_go_on(small: Any, llama: Any) -> None:
    def five_steps(model: Any) -> list[torch.Tensor]:
        def block(tracer: Any) -> Any:
            seen = []
            for step in tracer.iter[:]:
                seen.append(model.resid_post[2])
                if step == 4:
                    tracer.stop()
            return torch.cat(seen)

        return model.run(block, PROMPTS, temperature=0.0, max_tokens=None, ignore_eos=True)

    for mine, other in zip(five_steps(small), five_steps(llama), strict=True):
        assert_close(mine, other)


def test_a_block_that_is_done_gives_its_reservation_back(small: Any, llama: Any) -> None:
    """It has read what it reads and edited nothing: its request may be preempted and loses nothing."""
    seen = preempted(small)
    most = 0
    original = scheduler_of(small).schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        output = original(*args, **kwargs)
        most = max(most, len(output.num_scheduled_tokens))
        return output

    scheduler_of(small).schedule = schedule
    try:
        with small.trace(temperature=0.0, max_tokens=120, ignore_eos=True) as tracer:
            for ids in PROMPTS:
                with tracer.invoke(ids):
                    stream = small.resid_post[1].save()
                    result = tracer.result.save()
    finally:
        del scheduler_of(small).schedule
    wanted = plain(llama, PROMPTS, max_tokens=120, ignore_eos=True)
    assert [tokens_of(one) for one in result] == [tokens_of(one) for one in wanted]
    assert all(len(value) == len(ids) for value, ids in zip(stream, PROMPTS, strict=True))
    assert most > 2, "they may need 4 blocks each of 9, and still run together"
    assert seen


def test_one_that_the_cache_can_never_hold_is_refused_by_name(engines: Any) -> None:
    with ExitStack() as stack:
        tight = own_engine(engines, "llama", block_size=BLOCK, num_gpu_blocks_override=4, max_model_len=128)
        try:
            model = stack.enter_context(tight)
        except ValueError as error:  # vLLM 0.32 refuses such an engine itself
            assert "estimated maximum model length is 96" in str(error)
            return
        for settings in ({"max_tokens": 95}, {"max_tokens": None}):
            with pytest.raises(insitu.PromptError, match=r"has room for 96: lower max_tokens"):
                model.trace(PROMPTS[0], **settings)
        assert len(model.run(lambda tracer: model.resid_post[0], PROMPTS[0], max_tokens=30)) == len(PROMPTS[0])
        assert model.in_flight() == 0


def test_an_engine_by_priority_keeps_them_too(engines: Any, roomy: Any) -> None:
    settings = {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 8}
    with own_engine(engines, "llama", scheduling_policy="priority", **settings) as model:
        seen = preempted(model)
        given = [{"prompt_token_ids": ids} for ids in PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        model.vllm_entrypoint.enqueue(given, params, priority=[-1] * len(PROMPTS), use_tqdm=False)
        assert_same(traced(model, PROMPTS, TOKENS), roomy)
        completed(model)
        assert seen
        assert not any(seen)
