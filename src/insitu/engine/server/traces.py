"""Runs a trace that came over the network, and says in events what comes of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from insitu.block import ArgumentError, Block, FunctionBlock
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.async_trace import AsyncTrace
from insitu.engine.client.plan import Wave
from insitu.engine.job import Job
from insitu.engine.server.trusted import TrustedInvoke, trusted
from insitu.guard import GuardedBlock, GuardLimits, RestrictedInvoke, restricted
from insitu.guard.allowed import resolved
from insitu.net import (
    Done,
    Event,
    Failed,
    Key,
    Named,
    Output,
    Permission,
    Progress,
    Saves,
    TraceRequest,
    WireError,
    WireLimits,
)

Events = AsyncIterator[Event]
_EVERY = 0.5
_LONG = 1 << 14
_T = TypeVar("_T")


class Traces:
    """The traces of one server. Blocks run under the allow-list of ``insitu.guard``, but for those of trusted keys."""

    def __init__(
        self,
        model: AsyncVLLM,
        limits: GuardLimits | None = None,
        wire: WireLimits | None = None,
        adapters: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """``adapters`` gives the LoRA adapters that a client may name."""
        self._model = model
        self._adapters = adapters
        self._limits = limits or GuardLimits()
        self.wire: WireLimits = wire or WireLimits()

    async def run(self, asked: TraceRequest, key: Key) -> Events:
        """The events of a trace, of which the last is ``Done``. Closing this early aborts what runs. ``key``: whose
        limits it has."""
        try:
            wave = await self.prepared(asked, key)
            async for event in self._events(wave, asked.stream):
                yield event
        except Exception as error:
            yield Failed(self._model._running().failed(error))
        yield Done()

    async def generate(self, asked: TraceRequest, key: Key) -> Events:
        """The events of prompts without blocks: the output of each, with what edits saved, or the error of one."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            decoded = asked.decoded(resolved, self.wire).invokes
            engine = self._model._running()
            asked_for = [(one.prompt, self._settings(one.sampling)) for one in decoded]
            work = [engine.prepare_plain(prompt, settings, None, key.name) for prompt, settings in asked_for]
            tasks = [asyncio.create_task(engine.generated(one)) for one in work]
            for number, task in enumerate(tasks):
                output = await task
                if output.error is not None:
                    yield Failed(output.error, number)
                    output.error = None
                yield Output(number, output)
        except Exception as error:  # the engine's death among them
            yield Failed(self._model._running().failed(error))
        finally:
            for task in tasks:
                task.cancel()
        yield Done()

    async def _events(self, wave: Wave, stream: bool) -> Events:
        running = await self._model._running().begin(wave)
        over, seen = False, Seen(len(wave))
        try:
            async for output in running:
                if (progress := seen.progress(output)) is not None:
                    yield progress
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
            yield Saves(number, result.saves, result.returned, lost)

    async def prepared(self, asked: TraceRequest, key: Key) -> Wave:
        """Raises, before anything runs, what is to be said of a request that can't."""
        engine = self._model._running()
        tracer = AsyncTrace(engine, [], {})
        trace = uuid.uuid4().hex
        wave: Wave = []
        for number, one in enumerate(await self.blocks(asked, key, tracer)):
            block: Any = FunctionBlock(one.block) if isinstance(one.block, FunctionType) else one.block
            values = one.values if isinstance(one.block, (Block, GuardedBlock)) else {}
            about = {"shared": frozenset(one.shared), "invoke": number, "trace": trace}
            job = Job(uuid.uuid4().hex, block, values, "<client>", tracer, **about)
            wave.append((engine.prepare(one.prompt, self._settings(one.sampling), key.name), job))
        return wave

    async def blocks(self, asked: TraceRequest, key: Key, tracer: Any) -> Sequence[RestrictedInvoke | TrustedInvoke]:
        """Its blocks with the values that they need, restricted unless the key is trusted with any code. ``tracer`` is
        what that name stands for in them."""
        named = partial(self._named, tracer)
        if key.permission >= Permission.TRUSTED:
            make = partial(trusted, asked, named, self.wire)
        else:
            make = partial(restricted, asked, named, self._limits.of_key(key.limits), self.wire)
        return await beside_loop(make, asked.size)

    def _settings(self, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        """A client's, with the adapter that it names."""
        require_plain(sampling)
        name = sampling.get("lora_request")
        if not isinstance(name, str):
            return sampling
        if (adapter := self._adapters().get(name)) is None:
            raise ArgumentError(f"lora_request: this server has no adapter {name!r:.60}; GET /v1/models lists them")
        return {**sampling, "lora_request": adapter}

    def _named(self, tracer: Any, ref: Named) -> Any:
        if ref.kind == "model":
            return self._model
        if ref.kind == "tracer":
            return tracer
        if ref.kind == "node":
            return self._model.get(ref.path) if ref.path else self._model._root
        raise WireError(f"nothing of the kind {ref.kind!r:.40} is known here", "unknown")


async def beside_loop(work: Callable[[], _T], size: int) -> _T:
    """What a message of ``size`` bytes comes to. A long one takes long, and the loop is everybody's."""
    return await asyncio.to_thread(work) if size > _LONG else work()


class Seen:
    """What has come of the requests of a trace so far."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._tokens: dict[int, int] = {}
        self._ended: set[int] = set()
        self._told = time.monotonic()

    def progress(self, output: Any) -> Progress | None:
        """To be told now and then of a long trace."""
        self._tokens[output.invoke] = sum(len(one.token_ids) for one in output.outputs)
        if output.finished:
            self._ended.add(output.invoke)
        if time.monotonic() - self._told < _EVERY:
            return None
        self._told = time.monotonic()
        ended, begun = len(self._ended), len(self._tokens)
        return Progress(self._requests - begun, begun - ended, ended, sum(self._tokens.values()))


def require_plain(sampling: Mapping[str, Any]) -> None:
    """What insitu writes into ``extra_args`` itself is not the client's to write."""
    given = sampling.get("extra_args")
    for name in given if isinstance(given, Mapping) else ():
        if str(name).startswith("insitu"):
            raise ArgumentError(f"extra_args: {name!r:.60} is insitu's own; edits are named with `edits=`")
