"""An async engine for code in another thread, which waits."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from insitu.engine.client.base_model import returned_by
from insitu.engine.client.prompts import are_several
from insitu.engine.client.trace import Trace

if TYPE_CHECKING:
    from insitu.engine.client.async_engine import AsyncEngine


class Waited:
    """Has what the engine has; what has to be awaited is awaited on the engine's loop."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lock = threading.RLock()

    def run_function(self, function: Callable[[Any], Any], prompt: Any, **sampling: Any) -> Any:
        """As ``VLLM.run``."""
        several = are_several(prompt)
        engine: Any = self
        trace = Trace(engine, self._lock, prompt if several else [prompt], sampling)
        return returned_by(*trace.run_function(function), several)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not inspect.ismethod(value):
            return value

        def waiting(*args: Any, **kwargs: Any) -> Any:
            found = value(*args, **kwargs)
            if inspect.iscoroutine(found):
                return asyncio.run_coroutine_threadsafe(found, self._loop).result()
            return found

        return waiting
