"""A trace on an async engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from insitu.block import ArgumentError, AsyncCapturedBody, CapturedBody, Site
from insitu.engine.client.backend import Backend
from insitu.engine.client.plan import BaseTrace, Captured

if TYPE_CHECKING:
    from insitu.engine.client.async_engine import AsyncEngine
    from insitu.engine.client.plan import Wave
    from insitu.engine.client.result import Result


class AsyncTrace(BaseTrace, CapturedBody, AsyncCapturedBody):
    """One trace, and the ``tracer`` that its block knows.

    After ``with model.trace(...) as tracer:`` nothing has run yet: ``tracer.backend`` is iterated over or awaited,
    and what was saved is in ``.saves``. No name is bound, since the caller has gone on by then. An
    ``async with`` awaits the whole trace at its end and binds what was saved, as ``with`` does on a sync engine.
    """

    _backend: Backend | None = None

    def __init__(self, engine: AsyncEngine, prompts: Sequence[Any], settings: Mapping[str, Any]) -> None:
        super().__init__(engine, prompts, settings)
        self._async_engine = engine

    @property
    def backend(self) -> Backend:
        """The outputs of this trace, to be iterated over or awaited after the ``with``."""
        if self._backend is None:
            raise ArgumentError("`tracer.backend` is there when the `with` has ended, whose body it runs")
        return self._backend

    def run_block(self, site: Site) -> BaseException | None:
        saves: dict[str, Any] = {}
        plan = self.plan(Captured(site), saves.update)
        try:
            wave = next(plan)
        except StopIteration as done:
            return done.value
        where = site.block.filename, site.block.lineno
        self._backend = Backend(self._async_engine, plan, wave, saves, where, several=not self._prepared)
        return None

    async def run_block_async(self, site: Site) -> BaseException | None:
        return await self._drive(self.plan(Captured(site), site.scope.bind))

    async def run_function(self, function: Callable[[Any], Any]) -> tuple[list[Any], BaseException | None]:
        """``function(tracer)`` beside each prompt; what it returned for each, and the error if any."""
        return await self._drive(self.plan_function(function))

    async def _drive(self, plan: Generator[Wave, list[Result], Any]) -> Any:
        results: Any = None
        while True:
            try:
                wave = plan.send(results)
            except StopIteration as done:  # the plan's own, not one that the engine let out
                return done.value
            results = await self._async_engine.run(wave)
