"""Runs a trace that came over the network, and says in events what comes of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from insitu.block import InsituError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.async_trace import AsyncTrace
from insitu.engine.client.plan import Wave
from insitu.engine.job import Job
from insitu.guard import GuardedBlock, GuardLimits, restricted
from insitu.net import Done, Event, Failed, Key, Named, Output, Saves, TraceRequest, WireError, WireLimits

Events = AsyncIterator[Event]


class Traces:
    """The traces of one server. Blocks run under the allow-list of ``insitu.guard``."""

    def __init__(self, model: AsyncVLLM, limits: GuardLimits | None = None, wire: WireLimits | None = None) -> None:
        self._model = model
        self._limits = limits or GuardLimits()
        self.wire = wire or WireLimits()

    async def run(self, asked: TraceRequest, key: Key) -> Events:
        """The events of a trace, of which the last is ``Done``. Closing this early aborts what runs. ``key``: whose
        limits it has."""
        try:
            wave = self.prepared(asked, self._limits.of_key(key.limits))
            async for event in self._events(wave, asked.stream):
                yield event
        except (InsituError, WireError, ValueError, TypeError) as error:
            yield Failed(error)
        yield Done()

    async def _events(self, wave: Wave, stream: bool) -> Events:
        running = await self._model._running().begin(wave)
        over = False
        try:
            async for output in running:
                if stream and not output.finished:
                    yield Output(output.invoke, output)
            over = True
        finally:
            if not over:
                running.abandon()
        for number, result in enumerate(running.results):
            if result.error is not None:
                yield Failed(result.error, number)
                continue
            lost = [(one.filename, one.lineno, one.holder, one.deleted) for one in result.lost]
            yield Saves(number, result.saves, result.returned, lost, result.output)

    def prepared(self, asked: TraceRequest, limits: GuardLimits) -> Wave:
        """Raises, before anything runs, what is to be said of a request that can't."""
        engine = self._model._running()
        tracer = AsyncTrace(engine, [], {})

        def named(ref: Named) -> Any:
            if ref.kind == "model":
                return self._model
            if ref.kind == "tracer":
                return tracer
            if ref.kind == "node":
                return self._model.get(ref.path) if ref.path else self._model._root
            raise WireError(f"nothing of the kind {ref.kind!r:.40} is known here", "unknown")

        wave: Wave = []
        for number, one in enumerate(restricted(asked, named, limits, self.wire)):
            block: Any = one.block
            values = one.values if isinstance(one.block, GuardedBlock) else {}
            job = Job(uuid.uuid4().hex, block, values, "<client>", tracer, shared=frozenset(one.shared), invoke=number)
            wave.append((engine.prepare(one.prompt, one.sampling), job))
        return wave
