"""Blocks that run once for many requests in a worker process: they come there by messages, a copy for each request."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from insitu import VLLM
from insitu.run.sending import Sender
from tests.engine.cohorts import PROMPTS, counted
from tests.engine.taps import assert_same
from tests.engine.test_cohorts_home import tensors_in

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
OWN = torch.randn(len(PROMPTS), 128, generator=torch.Generator().manual_seed(5))
SHARED = torch.randn(128, generator=torch.Generator().manual_seed(6))


@pytest.fixture(scope="module")
def worker(in_worker: Any) -> Any:
    return in_worker


def read(model: VLLM) -> Any:
    return model.run(lambda tracer: [model.resid_post[1][-1] for _ in tracer.iter[:]], PROMPTS, **GREEDY)


def add_a_shared_vector(model: VLLM) -> Any:
    return model.run(lambda tracer: model.resid_post[1] + SHARED, PROMPTS, **GREEDY)


def add_a_vector_each(model: VLLM) -> Any:
    with model.trace(**GREEDY) as tracer:
        for prompt, vector in zip(PROMPTS, OWN, strict=True):
            with tracer.invoke(prompt):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[1] += vector
                    seen.append(model.logits[0])
    return seen


def ends_at_different_steps(model: VLLM) -> Any:
    """The blocks end at once, and what they leave goes home with their requests: in several messages."""
    with model.trace(temperature=0.0) as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt, max_tokens=1 + number % 4):
                rows = model.resid_post[1].save()
                kept = [model.mlp_out[2][-1], {"two": (model.resid_post[2] * 2, 3)}].save()
    return rows, kept


@pytest.mark.parametrize("work", [read, add_a_shared_vector, add_a_vector_each, ends_at_different_steps])
def test_each_request_gets_its_own(worker: VLLM, llama: VLLM, work: Any) -> None:
    work(worker)  # what places are like is learnt
    with counted(worker) as counts:
        found = work(worker)
    assert counts == [len(PROMPTS), 0]
    assert_same(found, work(llama), work.__name__)
    for each in tensors_in(found):
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
        each.zero_()


def _as_from_a_gpu(worker: Any) -> None:
    worker.insitu_host.interleaver.sender = Sender(is_far=lambda tensor: True)
    worker.insitu_host.interleaver.sender.keeps_whole = True
    gc.disable()


def _held(worker: Any) -> int:
    return worker.insitu_host.interleaver.sender._pinned.used


def _as_before(worker: Any) -> None:
    gc.enable()
    worker.insitu_host.interleaver.sender = Sender()
    worker.insitu_host.interleaver.sender.keeps_whole = True


@pytest.mark.parametrize("work", [read, ends_at_different_steps])
def test_what_has_gone_home_is_let_go_at_once(worker: VLLM, work: Any) -> None:
    """The worker's page-locked memory is to be had for the next trace, not once its garbage is collected."""
    work(worker)
    worker.vllm_entrypoint.collective_rpc(_as_from_a_gpu)
    try:
        with counted(worker) as counts:
            found = work(worker)
        assert counts == [len(PROMPTS), 0]
        assert worker.vllm_entrypoint.collective_rpc(_held) == [0]
        assert all(each.isfinite().all() for each in tensors_in(found))
    finally:
        worker.vllm_entrypoint.collective_rpc(_as_before)
