"""Room in the KV cache for traced requests: what each may come to need is kept for it from the start.

vLLM admits a request as soon as its prompt fits, and takes its memory away again if the cache fills up; what
that request has computed is computed a second time. A block can't be run a second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request

from insitu.engine.tag import is_whole


class Reserved:
    """The traced requests of one scheduler that are not to be preempted: those whose block goes on."""

    def __init__(self, cache: Any, max_model_len: int) -> None:
        """``cache``: the scheduler's KV cache manager."""
        self._cache = cache
        self._max_model_len = max_model_len
        self._needs: dict[str, int] = {}
        self._known: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._needs)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._needs

    def has_all(self, requests: Iterable[Request]) -> bool:
        return not [request for request in requests if request.request_id not in self._needs]

    def add(self, request: Request) -> None:
        """Notes a request if it has blocks that can't be run twice."""
        if is_whole(request.sampling_params):
            self._needs[request.request_id] = self._blocks(request.num_prompt_tokens + request.max_tokens)

    def release(self, requests: Iterable[str]) -> None:
        """These requests may be preempted from now on, or are over."""
        for request in requests:
            self._needs.pop(request, None)

    def need(self, request: Request) -> int:
        """How many blocks are kept for a request."""
        return self._needs.get(request.request_id, 0)

    @property
    def room(self) -> int:
        """All blocks that requests can have: one is vLLM's own."""
        return self._cache.block_pool.num_gpu_blocks - 1

    def _blocks(self, tokens: int) -> int:
        tokens = min(tokens, self._max_model_len)
        if tokens not in self._known:
            self._known[tokens] = self._computed(tokens)
        return self._known[tokens]

    def _computed(self, tokens: int) -> int:
        return self._cache.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=self._cache.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )
