"""Data parallel: several engine cores behind one front of vLLM's, each with a copy of the model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple
from itertools import chain
from typing import Any

from vllm.config import VllmConfig

from insitu.block import ArgumentError, EngineError
from insitu.engine.channel import AsyncWired, Shipment
from insitu.engine.job import Job
from insitu.engine.tag import tag_of
from insitu.run import Outcome

_OTHER_FRONTS = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "enable_elastic_ep",
    "headless",
)

_asked: ContextVar[int | None] = ContextVar("_asked", default=None)


@contextmanager
def only(copy: int | None) -> Iterator[None]:
    """Traces that are begun within run on this copy, and what is asked of a copy for them is asked of it alone."""
    token = _asked.set(copy)
    try:
        yield
    finally:
        _asked.reset(token)


def require_one_front(given: Mapping[str, Any]) -> None:
    """Raises ``ArgumentError``, by name, for forms of data parallel in which requests come by several fronts.
    ``given``: vLLM's arguments."""
    size, local = given.get("data_parallel_size") or 1, given.get("data_parallel_size_local")
    names = [name for name in _OTHER_FRONTS if not (given.get(name) is None or given[name] is False)]
    names += ["data_parallel_size_local"] * (local not in (None, size))
    names += ["data_parallel_backend"] * (given.get("data_parallel_backend") not in (None, "mp"))
    if names:
        raise ArgumentError(
            f"`{names[0]}`: insitu has all copies of a model behind one front, on this machine: give "
            f"data_parallel_size=N alone, or start a server for each copy and share the requests among them"
        )


def copies_refusal(repo: str, config: VllmConfig) -> EngineError | None:
    """Of a model whose copies do not run each by itself."""
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        return EngineError(
            f"`{repo}` has experts, which its copies compute together in each step, so that a block at one of them "
            f"would hold up or mix in the others: use tensor_parallel_size, or start a server for each copy"
        )
    return None


class Copies:
    """As ``AsyncWired``, to the workers of all cores.

    Jobs that were submitted together are with one copy, since their blocks may share what they change, and their
    requests are sent there. All others vLLM sends where it likes; what edits leave beside them is asked for there.
    """

    def __init__(self, core: Any, wires: Sequence[AsyncWired]) -> None:
        """``core``: vLLM's client of the cores, of which ``wires`` has one each, in their order."""
        self._core = core
        self._wires = wires
        self._at: dict[str, set[int]] = {}
        choose = core.get_core_engine_for_request

        def routed(request: Any) -> bytes:
            tag = tag_of(request.sampling_params)
            if tag is not None and tag.job in self._at:
                (request.data_parallel_rank,) = self._at[tag.job]
            chosen = choose(request)
            if tag is not None and tag.group:  # of several sequences, each may go elsewhere
                self._at.setdefault(tag.group, set()).add(core.core_engines.index(chosen))
            return chosen

        core.get_core_engine_for_request = routed

    @property
    def copies(self) -> int:
        return len(self._wires)

    async def open(self) -> None:
        await self._all(lambda wire: wire.open())

    async def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        if method == "insitu_collect":
            return await self._collect(*args)
        asked = _asked.get() if method in _ABOUT_ONE else None
        answers = await self._all(lambda wire: wire.call(method, *args, jobs=jobs), asked)
        return _JOINED[method](answers) if method in _JOINED else answers[0]

    async def submit(self, jobs: Sequence[Job]) -> Shipment:
        asked = _asked.get()
        copy = self._least_busy() if asked is None else asked
        for job in jobs:
            self._at[job.id] = {copy}
        try:
            shipment = await self._wires[copy].submit(jobs)
        except BaseException:
            self._forget(job.id for job in jobs)
            raise
        shipment.copy = copy
        return shipment

    async def install(self, number: int, edit: Job) -> None:
        installing = [wire.install(number, edit) for wire in self._wires]
        done = await asyncio.gather(*installing, return_exceptions=True)
        if errors := [error for error in done if error is not None]:
            await self.call("insitu_uninstall", [number])
            raise errors[0]

    async def settle(self, shipment: Shipment) -> None:
        await self._wires[shipment.copy].settle(shipment)

    async def drop(self, jobs: Sequence[str], shipment: Shipment | None = None) -> None:
        dropping = []
        for copy, wire in enumerate(self._wires):
            held = [key for key in jobs if copy in self._at.get(key, ())]
            own = shipment if shipment is not None and shipment.copy == copy else None
            if held or own is not None:
                dropping.append(wire.drop(held, own))
        self._forget(jobs)
        await asyncio.gather(*dropping)

    async def _collect(self, results: Mapping[str, Any]) -> dict[str, list[Outcome]]:
        asking = []
        for copy, wire in enumerate(self._wires):
            ended = {key: output for key, output in results.items() if copy in self._at.get(key, ())}
            if ended:
                asking.append(wire.call("insitu_collect", ended, jobs=list(ended)))
        self._forget(results)
        found: dict[str, list[Outcome]] = {key: [] for key in results}
        for key, outcomes in chain.from_iterable(part.items() for part in await asyncio.gather(*asking)):
            found[key] += outcomes
        return found

    async def _all(self, call: Callable[[AsyncWired], Awaitable[Any]], asked: int | None = None) -> list[Any]:
        wires = self._wires if asked is None else [self._wires[asked]]
        return await asyncio.gather(*map(call, wires))

    def _least_busy(self) -> int:
        jobs = Counter(chain.from_iterable(self._at.values()))
        requests = Counter(self._core.reqs_in_flight.values())
        loads = [jobs[copy] + requests[core] for copy, core in enumerate(self._core.core_engines)]
        return loads.index(min(loads))

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._at.pop(key, None)


def _summed(stats: Sequence[Any]) -> Any:
    return type(stats[0])(*map(sum, zip(*map(astuple, stats), strict=True)))


def _passed(taps: Sequence[Mapping[Any, bool]]) -> dict[Any, bool]:
    return {place: all(each[place] for each in taps) for place in taps[0]}


def _most_seen(visits: Sequence[Sequence[int]]) -> Sequence[int]:
    return max(visits, key=lambda each: sum(map(bool, each)))


_ABOUT_ONE = {"insitu_names", "insitu_taps", "insitu_use_taps", "insitu_visits"}
_JOINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "insitu_in_flight": sum,
    "insitu_stats": _summed,
    "insitu_taps": _passed,
    "insitu_visits": _most_seen,
}
