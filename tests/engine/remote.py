"""Traces of a local engine whose blocks and values go the way of a server: as messages, and under the guard."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from insitu.block import FunctionBlock
from insitu.engine.client.result import Result
from insitu.engine.client.trace import Trace
from insitu.engine.job import Job
from insitu.guard import GuardLimits, RestrictedInvoke, restricted
from insitu.net import (
    Failed,
    Named,
    Saves,
    TraceBuilder,
    TraceRequest,
    decode_event,
    decode_frame,
    encode_event,
    encode_frame,
)
from insitu.run import Outcome
from insitu.tree import Node, path_of


class RemoteTrace(Trace):
    """As a client of a server would send it."""

    def __init__(self, model: Any, prompts: Sequence[Any], settings: Any, limits: GuardLimits | None = None) -> None:
        super().__init__(model._running(), model._lock, prompts, settings)
        self._model = model
        self._limits = limits
        # What blocks know as their tracer: of a class that workers in other processes know.
        self._tracer = Trace(model._running(), model._lock, prompts, settings)
        run = self._submit
        self._arrivals: list[RestrictedInvoke] = []

        def submit(work: Sequence[tuple[Any, Job]]) -> list[Result]:
            results = [sent_back(result) for result in run(self._arrived(work))]
            for (_, job), one in zip(work, self._arrivals, strict=True):
                for name in one.changed():  # so that the trace warns of it
                    put_into(job.values[name], one.values[name])
            return results

        self._submit = submit

    def _arrived(self, work: Sequence[tuple[Any, Job]]) -> list[tuple[Any, Job]]:
        builder = TraceBuilder(self._named)
        for _, job in work:
            block = job.block.fn if isinstance(job.block, FunctionBlock) else job.block
            builder.add("prompt", block, job.values, {}, sorted(job.shared))
        request = TraceRequest.of_frame(decode_frame(encode_frame(builder.request().frame())))
        made = []
        self._arrivals = restricted(request, self._found, self._limits)
        trace = uuid.uuid4().hex
        for (prepared, job), one in zip(work, self._arrivals, strict=True):
            block: Any = one.block
            values = one.values if hasattr(block, "namespace") else {}
            names = job.exports, job.shared
            made.append((prepared, Job(job.id, block, values, "<client>", self._tracer, *names, trace=trace)))
        return made

    def _named(self, value: Any) -> Named | None:
        if value is self._model:
            return Named("model")
        if isinstance(value, Trace) or type(value).__name__ == "Invoke":
            return Named("tracer")
        return Named("node", path_of(value)) if isinstance(value, Node) else None

    def _found(self, name: Named) -> Any:
        if name.kind == "node":
            return self._model.get(name.path)
        return self._model if name.kind == "model" else self._tracer


def put_into(mine: Any, changed: Any) -> None:
    mine.clear()
    mine.extend(changed) if isinstance(mine, list) else mine.update(changed)


def sent_back(result: Result) -> Result:
    """What a client gets of a result."""
    outcomes = [_outcome(outcome) for outcome in result.outcomes]
    return Result(outcomes, result.output)


def _outcome(outcome: Outcome) -> Outcome:
    def through(event: Any) -> Any:
        return decode_event(decode_frame(encode_frame(encode_event(event))))

    saved: Saves = through(Saves(0, outcome.saves, outcome.returned, outcome.lost))
    bound: Saves = through(Saves(0, dict(outcome.bound)))
    error = None if outcome.error is None else through(Failed(outcome.error)).error
    lost = type(outcome.lost)(saved.lost) if not outcome.lost else outcome.lost
    return Outcome(dict(saved.values), dict(bound.values), saved.returned, error, lost)


def trace(model: Any, *prompts: Any, limits: GuardLimits | None = None, **sampling: Any) -> RemoteTrace:
    return RemoteTrace(model, prompts, {"temperature": 0.0, "max_tokens": 1, **sampling}, limits)


def run(model: Any, function: Callable[[Any], Any], prompt: Any, **sampling: Any) -> Any:
    returned, error = trace(model, prompt, **sampling).run_function(function)
    if error is not None:
        raise error
    return returned[0]
