"""vLLM's scheduler, with the two things that a traced request needs of it.

Its prompt is computed in one step, so that its block sees every row at once; and its block can
end it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from insitu.engine.job import BY_BLOCK, job_id


class TracedScheduler(Scheduler):
    """Given to vLLM as ``scheduler_cls``; becomes its synchronous or asynchronous scheduler."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> TracedScheduler:
        concrete = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
        return object.__new__(concrete)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        limit = self.max_num_running_reqs
        self.max_num_running_reqs = min(limit, len(self.running) + self._whole_prompts(limit))
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs = limit

    def _whole_prompts(self, limit: int) -> int:
        """How many waiting requests can begin in this step before a traced prompt would be split.

        Never 0 while nothing runs: a traced prompt larger than a whole step is split, and its block
        told. One that is resumed may be split, since its block sees no more of it.
        """
        budget = self.max_num_scheduled_tokens - sum(map(_tokens_left, self.running))
        count = 0
        for request in chain(self.skipped_waiting, self.waiting):
            if count >= limit:
                return limit
            tokens = _tokens_left(request)
            if budget < tokens <= self.max_num_scheduled_tokens and _is_to_be_whole(request):
                return count
            # At most so many: those before it may find parts of theirs in the prefix cache.
            budget -= tokens
            # One that is blocked may be passed over, so it does not count as a place taken.
            count += not self._is_blocked_waiting_status(request.status)
        return limit

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self._ended: frozenset[str] = getattr(model_runner_output, "insitu_ended", frozenset())
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if request.request_id in self._ended:
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
    return request.num_preemptions == 0 and job_id(request.sampling_params) is not None


def _tokens_left(request: Request) -> int:
    return max(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens, 0)
