"""What edited requests have left in the KV cache, where nobody else is to meet it.

vLLM's CPU kernel multiplies the rows of a block that are not used yet by zero: what lies there must be finite, and a
block of Python may have written anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class Leftover:
    """The blocks of one scheduler's KV cache that are to be cleared when they are given out again. No sooner: until
    then the prefix cache may have them for requests with the same edits."""

    def __init__(self, cache: Any, config: Any) -> None:
        """``cache``: the scheduler's KV cache manager."""
        self._cache = cache
        self._sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self._edited: set[str] = set()
        self._blocks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._edited or self._blocks)

    def note(self, requests: Iterable[str]) -> None:
        """These are edited from now on."""
        self._edited.update(requests)

    def freed(self, request: Request) -> None:
        """To be called before its blocks are others'."""
        if request.request_id in self._edited:
            self._blocks.update(chain.from_iterable(self._cache.get_block_ids(request.request_id)))
            self._blocks.discard(0)  # vLLM's own, which nobody is given
            if request.is_finished():
                self._edited.discard(request.request_id)

    def clear_in(self, output: SchedulerOutput) -> None:
        """Has the worker clear those that requests are given in this step."""
        found = self._blocks.intersection(self._given(output)) if self._blocks else None
        if found:
            self._blocks -= found
            output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), *found]

    def _given(self, output: SchedulerOutput) -> Iterable[int]:
        for new in output.scheduled_new_reqs:
            yield from self._beyond(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        given = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, ids, computed in given:
            if ids is not None:
                yield from self._beyond(ids, computed if request in cached.resumed_req_ids else 0)

    def _beyond(self, ids: tuple[list[int], ...], computed: int) -> Iterable[int]:
        """Without those that the prefix cache had."""
        return chain.from_iterable(own[computed // size :] for own, size in zip(ids, self._sizes, strict=True))
