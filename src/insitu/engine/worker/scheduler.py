"""vLLM's scheduler, with the three things that a traced request needs of it, and one that others need.

Its prompt is computed in one step, so that its block sees every row at once; it keeps its memory for as
long as its block goes on; and its block can end it. What an edited one has left in its memory, nobody else meets.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from insitu.engine.job import BY_BLOCK
from insitu.engine.tag import has_tag, is_whole
from insitu.engine.worker.leftover import Leftover
from insitu.engine.worker.reserved import Reserved

_NEVER_PREEMPTED = -(2**31)


class TracedScheduler(Scheduler):
    """Given to vLLM as ``scheduler_cls``; becomes its synchronous or asynchronous scheduler."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> TracedScheduler:
        concrete = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
        return object.__new__(concrete)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserved = Reserved(self.kv_cache_manager, self.max_model_len)
        self._with_blocks: set[str] = set()
        self._leftover = Leftover(self.kv_cache_manager, self.kv_cache_config)

    def add_request(self, request: Request) -> None:
        if has_tag(request.sampling_params):
            self._with_blocks.add(request.request_id)
            self._reserved.add(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = self._scheduled(*args, **kwargs) if self._with_blocks else super().schedule(*args, **kwargs)
        if self._leftover:
            self._leftover.clear_in(output)
        return output

    def _scheduled(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._with_blocks -= self.finished_req_ids
        self._reserved.release(self.finished_req_ids)
        if not self._reserved:  # none of those here is to be whole, or to keep anything
            return super().schedule(*args, **kwargs)
        self._put_victims_last()
        # 0.31 has a limit of its own for how many are let in.
        setting = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        limit = getattr(self, setting)
        setattr(self, setting, min(limit, len(self.running) + self._may_begin(limit)))
        try:
            return super().schedule(*args, **kwargs)
        finally:
            setattr(self, setting, limit)

    def _put_victims_last(self) -> None:
        """vLLM preempts the last of the running requests, or those of the largest priority value."""
        if not self._reserved.has_all(self.running):
            self.running.sort(key=lambda request: request not in self._reserved)
        if self.policy == SchedulingPolicy.PRIORITY:
            for request in self.running:
                if request in self._reserved:
                    request.priority = _NEVER_PREEMPTED

    def _may_begin(self, limit: int) -> int:
        """How many waiting requests can begin in this step before a traced prompt would be split, or a traced
        request begun for which there may not be room to the end.

        Never 0 while nothing runs: a traced prompt larger than a whole step is split, and its block
        told. One that is resumed may be split, since its block sees no more of it.
        """
        alone = not self.running and len(self.waiting) + len(self._looked_at_first()) < 2
        if alone or next(self._waiting_in_order(), None) is None:
            return limit
        budget = self.max_num_scheduled_tokens - sum(map(_tokens_next, self.running))
        reserved, loras = sum(map(self._reserved.need, self.running)), set(map(_lora, self.running)) - {0}
        count = 0
        for request in self._waiting_in_order():
            if count >= limit - len(self.running):
                return limit
            tokens, need = _tokens_left(request), self._reserved.need(request)
            if budget < tokens <= self.max_num_scheduled_tokens and _is_to_be_whole(request):
                return count
            if need and reserved and reserved + need > self._reserved.room:
                return count
            # At most so many: those before it may find parts of theirs in the prefix cache.
            budget -= tokens
            reserved += need
            # One that may be passed over is not sure to take a place.
            count += not self._may_be_passed_over(request, loras)
        return limit

    def _waiting_in_order(self) -> Iterator[Request]:
        """Waiting requests in the order in which vLLM looks at them."""
        return chain(self._looked_at_first(), self.waiting)

    def _looked_at_first(self) -> Any:
        """The queue that comes before the other; it has another name since 0.31."""
        return getattr(self, "skipped_waiting" if hasattr(self, "skipped_waiting") else "kv_holding_waiting")

    def _may_be_passed_over(self, request: Request, loras: set[int]) -> bool:
        """Whether vLLM may admit a later request in this one's stead; if not, notes its adapter in ``loras``."""
        with_its = loras | {_lora(request)} - {0}
        if self.lora_config is not None and len(with_its) > self.lora_config.max_loras:
            return True
        loras |= with_its
        stale = getattr(request, "num_stale_output_tokens", 0)  # new in 0.27
        return self._is_blocked_waiting_status(request.status) or stale > 0

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        if not self._with_blocks:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._reserved.release(getattr(model_runner_output, "insitu_released", ()))
        self._leftover.note(getattr(model_runner_output, "insitu_edited", ()))
        ended = getattr(model_runner_output, "insitu_ended", ())
        if not ended:  # vLLM asks for the method once a request: its own costs less
            return super().update_from_output(scheduler_output, model_runner_output)
        self._update_request_with_output = partial(self._update_or_end, ended, self._update_request_with_output)
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            del self._update_request_with_output

    def _free_request_blocks(self, request: Request) -> None:
        if self._leftover:
            self._leftover.freed(request)
        super()._free_request_blocks(request)

    @staticmethod
    def _update_or_end(
        ended: Container[str],
        update: Callable[..., tuple[list[int], bool]],
        request: Request,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = update(request, *args, **kwargs)
        if request.request_id in ended:
            # Not FINISHED_STOPPED: of a request that stopped, vLLM drops the last token's text.
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            request.stop_reason = BY_BLOCK
            stopped = True
        return new_token_ids, stopped


class _Sync(TracedScheduler):
    pass


class _Async(TracedScheduler, AsyncScheduler):
    pass


def _is_to_be_whole(request: Request) -> bool:
    return request.num_preemptions == 0 and is_whole(request.sampling_params)


def _lora(request: Request) -> int:
    return request.lora_request.lora_int_id if request.lora_request else 0


def _tokens_next(request: Request) -> int:
    """Of one that is running: none where vLLM is sure that the step under way is its last."""
    waited = request.num_output_placeholders
    last = request.num_prompt_tokens + request.max_tokens
    return 0 if waited > 0 and request.num_computed_tokens + 2 - waited >= last else _tokens_left(request)


def _tokens_left(request: Request) -> int:
    return max(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens, 0)
