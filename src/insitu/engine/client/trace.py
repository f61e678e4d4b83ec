"""A trace: the ``with`` statement whose body runs in the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from insitu.block import CapturedBody, Site
from insitu.engine.client.plan import BaseTrace, Captured

if TYPE_CHECKING:
    from collections.abc import Generator

    from insitu.engine.client.engine import Engine
    from insitu.engine.client.plan import Wave
    from insitu.engine.client.result import Result


class Trace(BaseTrace, CapturedBody):
    """One trace, and the ``tracer`` that its block knows.

    With a prompt, the body is the block of that request. Without, the body is run here to open the
    invokes, whose bodies are the blocks; all their requests are submitted together.
    """

    def __init__(
        self,
        engine: Engine,
        lock: threading.RLock | None,
        prompts: Sequence[Any],
        settings: Mapping[str, Any],
        keep_on: str | None = None,
        progress: bool = False,
    ) -> None:
        """``lock``: held while it runs; None where the engine takes many traces at once."""
        super().__init__(engine, prompts, settings, keep_on is not None and engine.keeps(keep_on))
        self._submit = partial(engine.run, progress=True) if progress else engine.run
        self._lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock

    def run_block(self, site: Site) -> BaseException | None:
        with self._lock:
            return self._drive(self.plan(Captured(site), site.scope.bind))

    def run_function(self, function: Callable[[Any], Any]) -> tuple[list[Any], BaseException | None]:
        """``function(tracer)`` beside each prompt; what it returned for each, and the error if any."""
        with self._lock:
            return self._drive(self.plan_function(function))

    def _drive(self, plan: Generator[Wave, list[Result], Any]) -> Any:
        results: Any = None
        while True:
            try:
                wave = plan.send(results)
            except StopIteration as done:  # the plan's own, not one that the engine let out
                return done.value
            results = self._submit(wave)
