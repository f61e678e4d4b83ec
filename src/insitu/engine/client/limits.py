"""What fits an engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Limits:
    """What fits: a whole sequence, and a prompt that is computed in one step."""

    max_model_len: int
    max_step_tokens: int
    vocab_size: int
    step_setting: str = "max_num_batched_tokens"
    """The engine argument that sets ``max_step_tokens``."""
    cache_tokens: int = sys.maxsize
    """What the KV cache holds of one request."""


def limits_of(config: VllmConfig) -> Limits:
    scheduler = config.scheduler_config
    steps = {"max_num_batched_tokens": scheduler.max_num_batched_tokens}
    if scheduler.long_prefill_token_threshold > 0:
        steps["long_prefill_token_threshold"] = scheduler.long_prefill_token_threshold
    setting = min(steps, key=lambda name: steps[name])
    model = config.model_config
    return Limits(model.max_model_len, steps[setting], model.get_vocab_size(), setting, _cache_tokens(config))


def _cache_tokens(config: VllmConfig) -> int:
    """How many tokens of one request the KV cache has room for: of all blocks, one is vLLM's own."""
    cache, model = config.cache_config, config.model_config
    if not cache.num_gpu_blocks or model.is_hybrid or model.is_attention_free or model.get_sliding_window():
        return model.max_model_len  # blocks of other kinds, or that are used again
    each = cache.num_gpu_blocks // config.parallel_config.data_parallel_size  # vLLM counts those of all copies
    return min(model.max_model_len, (each - 1) * cache.block_size)
