"""An async engine belongs to one event loop: the first that it is awaited on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from insitu.block import EngineError

T = TypeVar("T")


class OneLoop:
    """Notes the event loop of an engine, and refuses others."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    def enter(self) -> None:
        """Raises ``EngineError`` on another event loop than the engine's."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop.is_closed():
            raise EngineError(
                "the event loop that this engine ran on has ended, and the engine with it: do all of your work in one "
                "`asyncio.run`, or make a new model"
            )
        elif self._loop is not running:
            raise EngineError(
                "this engine runs on another event loop, the one on which it was first awaited, and maybe in another "
                "thread: hand it the work there, with asyncio.run_coroutine_threadsafe(coroutine, loop)"
            )

    def leave(self) -> None:
        """The next loop is the engine's."""
        self._loop = None


def in_a_loop_of_its_own(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine returns, run to its end here and now, also inside a loop that is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(function())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, function()).result()
