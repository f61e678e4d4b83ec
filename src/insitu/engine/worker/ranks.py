"""The ranks of a tensor-parallel model as vLLM sets them up, and which of its modules lie over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from vllm.distributed import get_pp_group, get_tp_group
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from insitu.engine.taps import install
from insitu.engine.worker.stages import stage_of
from insitu.run import Interleaver
from insitu.run.attention import is_attention
from insitu.run.layouts import Parallel
from insitu.run.parallel import Follower, Leader
from insitu.run.shards import Split
from insitu.run.tapped_ranks import TappedFollower, TappedLeader


def interleaver_of(runner: Any, model: torch.nn.Module, unembed: Callable[..., Any], safe_ids: int) -> Interleaver:
    """The interleaver of this rank: alone, leading or following."""
    if get_pp_group().world_size > 1:
        return stage_of(runner, model, unembed, safe_ids)
    group = Ranks()
    if group.size == 1:
        return install.interleaver_for(runner, model, unembed, safe_ids)
    heads = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    vocabulary = tuple({Split(((head.num_embeddings_per_partition, 1),)) for head in heads if head.tp_size > 1})

    def lies(module: Any) -> Parallel | None:
        if isinstance(module, BaseLayerWithLoRA):  # which computes what the module that it stands for would
            module = module.base_layer
        return Parallel(inside=vocabulary) if isinstance(module, LogitsProcessor) else parallel(module)

    about = (model, unembed, safe_ids, group, lies, runner.model_config.get_hidden_size())
    taps = install.of(runner)
    if taps is None:
        return (Follower if group.rank else Leader)(*about)
    if group.rank:
        tapped = TappedFollower(*about, taps=taps)
    else:
        tapped = TappedLeader(*about, taps=taps, repeatable=install.is_repeatable(runner))
    taps.shown = tapped.pass_by
    return tapped


_PATIENCE = 10.0
"""Seconds that a rank waits for rank 0 before it looks whether there still is one."""


class Ranks:
    """vLLM's tensor-parallel group."""

    def __init__(self) -> None:
        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size
        self._parent = os.getppid()
        self._leader: Any = self._group.broadcast_object(os.getpid(), src=0)

    def send(self, message: Any) -> None:
        self._group.broadcast_object(message, src=0)

    def receive(self) -> Any:
        """Ends this process once the engine's and rank 0 are gone, who would be told of that otherwise: vLLM ends only
        what it waits for itself then."""
        queue = self._group.mq_broadcaster
        while queue is not None:
            try:
                return queue.dequeue(timeout=_PATIENCE)
            except TimeoutError:
                if os.getppid() != self._parent and not psutil.pid_exists(self._leader):
                    raise SystemExit("the engine's process and rank 0 have ended") from None
        return self._group.broadcast_object(None, src=0)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group.device_group)
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        whole = tensor.contiguous()
        dist.broadcast(whole, src=self._group.ranks[0], group=self._group.device_group)
        if whole is not tensor:
            tensor.copy_(whole)


def parallel(module: Any) -> Parallel | None:
    """How a module of vLLM lies over the ranks; None if it is whole on each."""
    if is_attention(module) and hasattr(module, "num_heads"):
        size = getattr(module, "head_size_v", None) or module.head_size
        return Parallel(returns=Split(((module.num_heads * size, 1),)))
    if any(word in type(module).__name__ for word in ("MoE", "RoutedExperts")):
        return Parallel(summed=True)  # also what experts are made of, which has no tp_size of its own
    if getattr(module, "tp_size", 1) == 1:
        return None
    if isinstance(module, ColumnParallelLinear):
        return None if module.gather_output else Parallel(opens=_columns(module))
    if isinstance(module, RowParallelLinear):
        split = Split(((module.input_size_per_partition, 1),)) if module.input_is_parallel else None
        return Parallel(closes=split, summed=not module.reduce_results)
    if isinstance(module, VocabParallelEmbedding):
        return Parallel(inside=())
    return None


def _columns(module: ColumnParallelLinear) -> tuple[Split, ...]:
    """The layout of the output, and those of its pieces."""
    widths = [(width, 1) for width in module.output_partition_sizes]
    if isinstance(module, QKVParallelLinear):
        kv = module.num_kv_head_replicas
        widths = [(width, kv if i else 1) for i, (width, _) in enumerate(widths)]
    elif not isinstance(module, MergedColumnParallelLinear):
        widths = [(sum(width for width, _ in widths), 1)]
    return tuple(dict.fromkeys([Split(tuple(widths)), *(Split((each,)) for each in widths)]))
