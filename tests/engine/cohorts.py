"""What tests of blocks that are run once for many requests share: prompts, runs of both kinds, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from insitu import VLLM
from insitu.engine.worker.host import Host

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 5], [9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [7, 8, 9], [11, 12, 13, 14, 15, 16, 17]]
GREEDY = {"temperature": 0.0, "max_tokens": 2}


def at_hand(model: VLLM) -> bool:
    """Whether the model runs in this process."""
    return hasattr(model.vllm_entrypoint.llm_engine.model_executor, "driver_worker")


def host_of(model: VLLM) -> Host:
    executor = model.vllm_entrypoint.llm_engine.model_executor
    return executor.driver_worker.worker.insitu_host


def may_be_together(worker: Any, together: bool) -> None:
    if isinstance(worker.insitu_host, Host):
        worker.insitu_host.together = together


def run_together(model: VLLM, together: bool) -> None:
    """From now on blocks may be run once for many, or not."""
    model.vllm_entrypoint.collective_rpc(may_be_together, args=(together,))


@contextmanager
def counted(model: VLLM) -> Iterator[list[int]]:
    """How many blocks have run together in here, and how many alone."""
    before, counts = model.stats(), [0, 0]
    yield counts
    after = model.stats()
    counts[:] = [after.blocks_together - before.blocks_together, after.blocks_alone - before.blocks_alone]


def alone_and_together(model: VLLM, work: Callable[[], Any]) -> tuple[Any, Any]:
    found = []
    for together in (False, False, True):  # the first time, the model's places are learnt
        run_together(model, together)
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
        finally:
            run_together(model, True)
    assert model.in_flight() == 0
    return found[1], found[2]


def same(one: Any, other: Any) -> bool:
    """Equal to the bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if hasattr(one, "exceptions"):
        return hasattr(other, "exceptions") and same(one.exceptions, other.exceptions)
    if isinstance(one, Exception):
        return type(one) is type(other) and str(one) == str(other)
    return one == other
