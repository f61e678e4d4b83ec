"""A model whose engine is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from insitu.block.errors import needing
from insitu.block.tracebacks import async_user_lines, user_lines
from insitu.engine.client.async_trace import AsyncTrace
from insitu.engine.client.base_model import MISSING, BaseModel, returned_by
from insitu.engine.client.edit import AsyncEditStatement, Edit, refuse_in_block
from insitu.engine.client.invokes import merged_error
from insitu.engine.client.prompts import are_several
from insitu.tree import Listing, Node, path_of

if TYPE_CHECKING:
    from vllm import RequestOutput

    from insitu.engine.check.report import CheckReport
    from insitu.engine.client.async_engine import AsyncEngine
    from insitu.engine.worker.stats import Stats


class AsyncVLLM(BaseModel["AsyncEngine"]):
    """What ``VLLM(repo, mode="async", ...)`` gives: a model on vLLM's ``AsyncLLM``.

    ``engine_args`` are whatever ``AsyncLLM`` takes. The engine's core is another process, with the model in it or,
    if it has several ranks or with ``engine="workers"``, in further ones. Many traces may run at once::

        async def main() -> None:
            model = VLLM("Qwen/Qwen3-0.6B", mode="async")
            async with model.trace("The Eiffel Tower is in the city of", max_tokens=1):
                hidden = model.model.layers[6].mlp.output.save()

    The engine belongs to the event loop on which it is first awaited; on another one, ``EngineError`` is raised.
    The first trace, ``dispatch=True``, ``dispatch()`` or ``await model`` starts it, which holds the loop up meanwhile.
    """

    _later: ClassVar[dict[str, str]] = {}
    _listings: dict[tuple[str, str], Listing]

    def __init__(
        self,
        repo: str,
        *,
        dispatch: bool = False,
        taps: Sequence[str] = (),
        engine: Literal["in-process", "workers"] | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(repo, taps, engine, engine_args)
        if dispatch:
            self.dispatch()

    def __await__(self) -> Generator[Any, None, AsyncVLLM]:
        """Builds the engine, if there is none yet: ``await model``, ``await model.dispatch()``."""
        self._running()
        yield from asyncio.sleep(0).__await__()
        return self

    async def __aenter__(self) -> AsyncVLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()

    @property
    def vllm_entrypoint(self) -> Any:
        """The real ``vllm.v1.engine.async_llm.AsyncLLM``. Its requests run beside traced ones, untouched."""
        return self._running().llm

    @async_user_lines
    async def in_flight(self) -> int:
        """How many traced requests the engine still holds anything of; 0 once all have ended."""
        return await self._engine.in_flight() if self._engine else 0

    @async_user_lines
    async def stats(self) -> Stats:
        """How many steps took which path since the engine started."""
        return await self._running().stats()

    @async_user_lines
    async def listing(self, module: Node | str, operation: str = "") -> Listing:
        """The operations in a module's ``forward``, as ``print(module.source)`` shows them on a sync engine; of an
        ``operation`` in it, those of what it calls."""
        path = module if isinstance(module, str) else path_of(module)
        return await self._running().operations(path, operation)

    @async_user_lines
    async def check(
        self, prompts: Sequence[Any] | None = None, *, reference: bool = True, show: bool = True
    ) -> CheckReport:
        """As ``VLLM.check``, beside whatever else this engine does; of a model in several copies, of each."""
        with needing():
            from insitu.engine.check.check import check
        from insitu.engine.check.report import joined
        from insitu.engine.client.copies import only
        from insitu.engine.client.waited import Waited

        engine = Waited(self._running(), asyncio.get_running_loop())
        reports = []
        for copy in range(self._running().copies):
            with only(copy):
                reports.append(await asyncio.to_thread(check, self, engine, engine.run_function, prompts, reference))
        report = joined(reports)
        if show:
            report.show()
        return report

    @user_lines
    def trace(self, prompt: Any = MISSING, **sampling: Any) -> AsyncTrace:
        """A ``with`` or ``async with`` statement whose body runs beside the forward of ``prompt``.

        ``prompt`` and ``sampling`` are those of ``VLLM.trace``. After a ``with``, ``tracer.backend`` is iterated over
        or awaited; an ``async with`` awaits the whole trace and binds what was saved.
        """
        return AsyncTrace(self._running(), [] if prompt is MISSING else [prompt], sampling)

    @async_user_lines
    async def run(self, function: Callable[[AsyncTrace], Any], prompt: Any, **sampling: Any) -> Any:
        """``function(tracer)`` as the block beside ``prompt``; returns what it returns, a list for a list of prompts.

        Nothing needs to be saved. Works where a block's source can't be found.
        """
        several = are_several(prompt)
        trace = AsyncTrace(self._running(), prompt if several else [prompt], sampling)
        returned, error = await trace.run_function(function)
        return returned_by(returned, error, several)

    @async_user_lines
    async def generate(self, prompts: Any, **sampling: Any) -> list[RequestOutput]:
        """Plain generation, as ``VLLM.generate``: one output for each prompt, with what edits saved in ``.saves``."""
        several = are_several(prompts)
        outputs = await self._running().generate(prompts if several else [prompts], sampling)
        error = merged_error(outputs, "requests")
        if error is not None:
            raise error
        return outputs

    # -- edits ----------------------------------------------------------------------------

    @user_lines
    def edit(self, name: str | None = None) -> AsyncEditStatement:
        """``async with model.edit(name) as (tracer, edit):``, as ``VLLM.edit``; ``edit.aclear()`` takes it off."""
        return AsyncEditStatement(self._running(), name)

    def edits(self) -> list[Edit]:
        """The installed edits, in the order in which they run."""
        return list(self._engine.installed) if self._engine else []

    @async_user_lines
    async def aclear_edits(self) -> None:
        """Takes all edits off the engine. Requests that came before keep theirs to their end."""
        refuse_in_block("edits", "cleared")
        if self._engine is not None:
            await self._engine.clear(self._engine.installed)

    def _start(self) -> AsyncEngine:
        return _starter()(self._repo, self._engine_args, self._taps, self, self._workers)

    def _listed(self, path: str, op: str) -> Listing | None:
        return None


def _starter() -> Any:
    # Imported here: vLLM takes seconds to import, and a model that is only made does not pay for it.
    with needing():
        from insitu.engine.client.start_async import start_async

    return start_async
