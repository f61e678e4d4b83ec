"""What an async trace leads to: its outputs, iterated over or awaited."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from insitu.block import ArgumentError, UnsavedWarning
from insitu.block.tracebacks import async_user_lines

if TYPE_CHECKING:
    from insitu.engine.client.async_engine import AsyncEngine
    from insitu.engine.client.plan import Plan, Wave
    from insitu.engine.client.result import Result
    from insitu.engine.client.running import Running


class Backend:
    """The outputs of a trace. Its requests are submitted when it is iterated over or awaited, once.

    ``async for output in tracer.backend`` gives vLLM's ``RequestOutput`` of each step, with ``.invoke``, the
    index of the invoke. The last one of a request has ``.saves``: what its block saved, by name. What a block
    raised is raised at the end, when the other invokes have ended too. To leave the loop early aborts the
    requests, as ``aclose()`` and cancelling the task do.

    ``await tracer.backend`` gives the last output; of a trace with invokes, a list of the last one of each.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        plan: Plan,
        wave: Wave,
        saves: dict[str, Any],
        where: tuple[str, int],
        several: bool,
    ) -> None:
        self.saves = saves
        """What was saved, by name, once all has ended: of several invokes together, as a sync trace binds it."""
        self._engine = engine
        self._plan: Plan | None = plan
        self._wave = wave
        self._where = where
        self._several = several
        self._stream: Callable[[], Stream | None] = lambda: None

    def __aiter__(self) -> Stream:
        if self._plan is None:
            raise ArgumentError("this trace has run, and runs once: open another `with model.trace(...)`")
        stream = Stream(self._engine, self._plan, self._wave)
        self._plan, self._stream = None, weakref.ref(stream)
        return stream

    def __await__(self) -> Generator[Any, None, Any]:
        return self._last().__await__()

    @async_user_lines
    async def _last(self) -> Any:
        last: dict[int, Any] = {}
        async for output in self:
            last[output.invoke] = output
        return [last[invoke] for invoke in sorted(last)] if self._several else last[0]

    async def aclose(self) -> None:
        """Aborts what has not ended, and frees what it held. A trace that has not begun does not run."""
        self._plan = None
        if (stream := self._stream()) is not None:
            await stream.aclose()

    def __del__(self) -> None:
        if self._plan is not None:
            warnings.warn_explicit(
                "this trace never ran: `await tracer.backend`, iterate over it with `async for`, or write "
                "`async with model.trace(...)`",
                UnsavedWarning,
                *self._where,
            )


class Stream:
    """One iteration over the outputs of a trace."""

    def __init__(self, engine: AsyncEngine, plan: Plan, wave: Wave) -> None:
        self._engine = engine
        self._plan: Plan | None = plan
        self._wave = wave
        self._running: Running | None = None

    def __aiter__(self) -> Stream:
        return self

    @async_user_lines
    async def __anext__(self) -> Any:
        if self._plan is None:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException:
            self._plan = None
            self._abandon()
            raise

    async def aclose(self) -> None:
        self._plan = None
        if (task := self._abandon()) is not None:
            await task

    async def _next(self) -> Any:
        while True:
            if self._running is None:
                self._running = await self._engine.begin(self._wave)
            output = await anext(self._running, None)
            if output is not None:
                return output
            ended, self._running = self._running, None
            if not self._goes_on(ended.results):
                raise StopAsyncIteration

    def _goes_on(self, results: list[Result]) -> bool:
        """Whether there are further requests. Raises what the caller shall see."""
        assert self._plan is not None
        try:
            self._wave = self._plan.send(results)
            return True
        except StopIteration as done:
            error: BaseException | None = done.value
        if error is None:
            return False
        try:
            raise error
        finally:
            del error, results

    def _abandon(self) -> asyncio.Task[None] | None:
        running, self._running = self._running, None
        return running.abandon() if running is not None else None

    def __del__(self) -> None:
        running, loop = self._running, self._engine.home.loop
        if running is None or loop is None or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop:
            running.abandon()
        else:
            loop.call_soon_threadsafe(running.abandon)
