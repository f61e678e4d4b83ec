"""What insitu needs of vLLM's V1 model runner (the CPU's runner is one)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from insitu.engine.host import Host
from insitu.engine.job import job_id
from insitu.run import BlockRun, Interleaver, Rows


class V1Adapter:
    """Drives a host from one V1 model runner, by wrapping four methods of that instance.

    V1 settles the order of its batch inside ``execute_model``, so rows are read no earlier than
    in ``_model_forward``.
    """

    METHODS = ("execute_model", "_model_forward", "_sample", "sample_tokens")

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model = runner.get_model()
        self._compute_logits: Callable[..., Any] = self._model.compute_logits
        safe_ids = min(runner.model_config.get_vocab_size(), runner.model_config.max_model_len)
        self.interleaver = Interleaver(self._model, self._compute_logits, safe_ids)
        self.host = Host(self.interleaver)
        self._runs: dict[str, BlockRun] = {}
        self._in_forward = False
        self._expects_logits = False
        for name in self.METHODS:
            original = getattr(runner, name)
            setattr(runner, name, _Wrapped(getattr(self, name), original))
        self._model.__dict__["compute_logits"] = self.compute_logits

    def execute_model(self, original: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._admit(scheduled)
        self._runs = self.host.runs(scheduled.num_scheduled_tokens)
        if not self._runs:
            self.host.plain_steps += bool(scheduled.total_num_scheduled_tokens)
            return original(scheduled, *args, **kwargs)
        self._in_forward = self.interleaver.begin(self._runs.values())
        self.host.eager_steps += self._in_forward
        self.host.plain_steps += not self._in_forward
        self._scheduled = scheduled.num_scheduled_tokens
        self._expects_logits = True
        try:
            return original(scheduled, *args, **kwargs)
        finally:
            self.interleaver.close()

    def _admit(self, scheduled: Any) -> None:
        host = self.host
        if not host.jobs:
            return
        for new in scheduled.scheduled_new_reqs:
            job = job_id(new.sampling_params)
            if job is not None:
                tokens = scheduled.num_scheduled_tokens[new.req_id]
                host.admit(new.req_id, job, new.num_computed_tokens, tokens, _prompt_length(new))
        host.preempted(scheduled.preempted_req_ids or ())
        host.preempted(scheduled.scheduled_cached_reqs.resumed_req_ids)

    def _model_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._runs:
            return original(*args, **kwargs)
        if self._in_forward:
            get_forward_context().skip_compiled = True
            self.interleaver.open(self._token_rows(_rows_in(kwargs)))
        hidden = original(*args, **kwargs)
        self.interleaver.rows = self._request_rows()
        return hidden

    def compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        logits = self._compute_logits(*args, **kwargs)
        if self._expects_logits and logits is not None:
            # Once a step: prompt log-probabilities ask for logits too, later and of other rows.
            self._expects_logits = False
            logits = self.interleaver.logits(logits)
        return logits

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._runs:
            self.interleaver.samples(output.sampled_token_ids)
        return output

    def sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._runs:
            # The scheduler's half of this is TracedScheduler.update_from_output.
            output.insitu_ended = self.host.ended(self._runs)
        return output

    def _token_rows(self, total: int) -> dict[BlockRun, Rows]:
        rows: dict[BlockRun, Rows] = {}
        start = 0
        for request in self._runner.input_batch.req_ids:
            stop = start + self._scheduled[request]
            if run := self._runs.get(request):
                rows[run] = Rows(start, stop, total)
            start = stop
        return rows

    def _request_rows(self) -> dict[BlockRun, Rows]:
        order = self._runner.input_batch.req_ids
        return {
            self._runs[request]: Rows(i, i + 1, len(order)) for i, request in enumerate(order) if request in self._runs
        }


class _Wrapped:
    """A method of the runner's instance, with the original handed to its replacement."""

    def __init__(self, replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._replacement = replacement
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(self._original, *args, **kwargs)


def _rows_in(kwargs: dict[str, Any]) -> int:
    """The length of the token axis that the forward runs on, padding included."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name].shape[0]
    return kwargs["positions"].shape[-1]


def _prompt_length(new: Any) -> int:
    ids = new.prompt_token_ids
    return len(ids) if ids is not None else len(new.prompt_embeds)
