"""What the tests of taps share: their places, prompts and comparison, and taps as in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from insitu.run import Cache
from tests.engine.helpers import difference

PLACES = [
    "resid_post",
    "embed",
    "model.layers.1.mlp.output",
    "model.layers.2.input",
    "model.layers.2.post_attention_layernorm.input",
    "model.layers.3.self_attn.output",
    "model.norm.output",
]
PROMPTS = [[5, 90, 33, 400, 17, 8, 250], [31, 7, 7, 12], [44], [6, 300, 21, 21, 21, 9]]
SETTINGS = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}

Block = Callable[[Any, Any], Any]


def taps_of(model: Any) -> Any:
    return model.vllm_entrypoint.llm_engine.vllm_config.compilation_config.static_forward_context["insitu.taps"]


@contextmanager
def recorded(tapped: Any) -> Iterator[None]:
    """The taps of this engine record, as they do in a graph, in each forward that could be one."""
    tapped.vllm_entrypoint.collective_rpc(as_if_recorded, args=(True,))
    try:
        yield
    finally:
        tapped.vllm_entrypoint.collective_rpc(as_if_recorded, args=(False,))


def as_if_recorded(worker: Any, recorded: bool) -> None:
    """As ``recorded``, in a worker, until it is told otherwise."""
    runner = worker.model_runner
    taps = runner.vllm_config.compilation_config.static_forward_context["insitu.taps"]
    taps.rows = 256
    for tap in taps.taps.values():
        tap.rows, tap.copies, tap.table = taps.rows, None, None
    shown, taps.shown = taps.shown, None
    runner._dummy_run(1)  # makes copies and tables, as what vLLM runs before it records graphs does
    taps.shown, interleaver = shown, shown.__self__
    taps.in_graph = lambda tensor: (
        recorded and interleaver._compiled and interleaver.one_graph and not interleaver.calls.running
    )


def name_of(block: Block) -> str:
    return block.__name__


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Cache):
        return flat([cached.output for cached in value.values()])
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in flat(part)]
    return []


def assert_same(ours: Any, wanted: Any, what: str) -> None:
    ours, wanted = flat(ours), flat(wanted)
    assert len(ours) == len(wanted) > 0
    for i, (one, two) in enumerate(zip(ours, wanted, strict=True)):
        assert difference(one, two) < 2e-5, f"{what}, value {i}"
