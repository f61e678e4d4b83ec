"""Requests that were submitted together to an async engine, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from insitu.block import RequestError
from insitu.engine.channel import Shipment
from insitu.engine.client.engine import ABORTED, request_of
from insitu.engine.client.result import Prepared, Result
from insitu.engine.job import Job

if TYPE_CHECKING:
    from insitu.engine.client.async_engine import AsyncEngine


class Running:
    """Iterated over, gives the outputs of all the requests as they come; ``results`` are there when it ends.

    The last output of a request comes when its block's values are here, and not at all if the block failed.
    Whoever does not go on to the end calls ``abandon``.
    """

    def __init__(self, engine: AsyncEngine, work: Sequence[tuple[Prepared, Job]], shipment: Shipment) -> None:
        self._engine = engine
        self._shipment = shipment
        self._jobs = [job.id for _, job in work]
        self._results: dict[str, Result] = {}
        self._collected: set[str] = set()
        self._outputs: asyncio.Queue[Any] = asyncio.Queue(1)
        self._left = len(work)
        self._settled = False
        self._tasks = [asyncio.create_task(self._follow(*one)) for one in work]

    @property
    def results(self) -> list[Result]:
        return [self._results[job] for job in self._jobs]

    def __aiter__(self) -> Running:
        return self

    async def __anext__(self) -> Any:
        while self._left:
            output = await self._outputs.get()
            if output is not None:
                return output
            self._left -= 1
        if not self._settled:
            self._settled = True
            await self._settle()
        raise StopAsyncIteration

    def abandon(self) -> asyncio.Task[None]:
        """Aborts what has not ended, and frees what it held."""
        for task in self._tasks:
            task.cancel()
        return self._engine.end(self._release())

    async def _release(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each aborts its own request
        await self._engine.drop(self._lost(), self._shipment)

    async def _settle(self) -> None:
        if lost := self._lost():
            await self._engine.drop(lost)
        await self._engine.settle(self._shipment)

    def _lost(self) -> list[str]:
        return [job for job in self._jobs if job not in self._collected]

    async def _follow(self, prepared: Prepared, job: Job) -> None:
        try:
            self._results[job.id] = await self._followed(prepared, job)
        except Exception as error:
            self._results[job.id] = self._engine.refused(self._engine.failed(error))
        await self._outputs.put(None)

    async def _followed(self, prepared: Prepared, job: Job) -> Result:
        request = request_of(prepared, job)
        outputs = self._engine.llm.generate(request.prompt, request.params, job.id, lora_request=request.lora)
        completions: dict[int, Any] = {}
        async with aclosing(outputs):  # which aborts the request, wherever this is left
            async for output in outputs:
                output.invoke = job.invoke
                # Of several sequences, vLLM gives those that have gone on.
                completions.update((completion.index, completion) for completion in output.outputs)
                output.outputs = [completions[index] for index in sorted(completions)]
                if output.finished:
                    return await self._ended(job.id, output)
                await self._outputs.put(output)
        return self._engine.refused(RequestError(ABORTED))

    async def _ended(self, job: str, output: Any) -> Result:
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            return self._engine.refused(RequestError(ABORTED))
        self._collected.add(job)
        result = Result(await self._engine.collect(job, output), output)
        result.share()
        if result.error is None:
            await self._outputs.put(output)
        return result
