"""vLLM's asynchronous engine, which steps by itself while requests are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import zmq
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from insitu.block import EngineError, RequestError
from insitu.engine.channel import AsyncWired, Shipment
from insitu.engine.client.copies import Copies
from insitu.engine.client.engine import ABORTED, EngineClient, no_tokenizer
from insitu.engine.client.installed import Installed
from insitu.engine.client.one_loop import OneLoop
from insitu.engine.client.result import Prepared, Result
from insitu.engine.client.running import Running
from insitu.engine.job import Job
from insitu.engine.tag import Tag
from insitu.run import Outcome

if TYPE_CHECKING:
    from insitu.engine.client.edit import Edit


_GRACE = 15.0
"""Seconds for the core to end before it is killed. It waits for its workers 5 itself, so that vLLM's own 5 for both are
too few on a busy machine."""


class AsyncEngine(EngineClient):
    """The engine of an async model. It belongs to the event loop on which it is first awaited."""

    def __init__(self, llm: AsyncLLM, channel: AsyncWired | Copies, owner: object, home: OneLoop) -> None:
        super().__init__(llm, llm.vllm_config, channel, owner)
        self.home = home
        self.copies: int = channel.copies
        self.installed: Installed = Installed(llm)
        self._ending: set[asyncio.Task[None]] = set()
        self._ended: dict[str, tuple[Any, asyncio.Future[list[Outcome]]]] = {}
        self._collecting = False
        self._installing = asyncio.Lock()

    @property
    def tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise no_tokenizer()
        return self.llm.get_tokenizer()

    async def in_flight(self) -> int:
        while self._ending:
            await asyncio.wait(self._ending)
        await self._sweep()
        return await super().in_flight()

    def watch(self) -> None:
        """From now on, requests of every entry point pass by here on their way out, and their outputs on their way."""
        send, generate = self.llm.engine_core.add_request_async, self.llm.generate

        async def stamped(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.installed.stamp(request)
            return await send(request, *args, **kwargs)

        async def delivered(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            completions: dict[int, Any] = {}
            ended = False
            try:
                async with aclosing(generate(*args, **kwargs)) as outputs:
                    async for output in outputs:
                        completions.update((completion.index, completion) for completion in output.outputs)
                        if ended := output.finished:
                            # The last output of several sequences holds the one that ended last.
                            shown = output.outputs
                            output.outputs = [completions[index] for index in sorted(completions)]
                            await self._deliver(output)
                            output.outputs = shown
                        yield output
            finally:
                if not ended and self.installed.outstanding:
                    self.end(self._sweep())

        self.llm.engine_core.add_request_async, self.llm.generate = stamped, delivered

    async def _deliver(self, output: Any) -> None:
        """Puts on a finished output what edits left beside its request."""
        for group in self.installed.finished([output]):
            try:
                self.installed.attach(output, await self.collect(group, output))
            finally:  # also if whoever waits is cancelled, which does not take the collecting back
                if numbers := self.installed.forget([group]):
                    self.end(self._uninstall(numbers))

    async def _sweep(self) -> None:
        """Lets go of what edits hold for requests that were aborted."""
        if gone := self.installed.gone():
            await self._channel.drop(gone)
            await self._uninstall(self.installed.forget(gone))

    async def _uninstall(self, numbers: list[int]) -> None:
        if numbers:
            await self._channel.call("insitu_uninstall", numbers)

    async def install(self, edit: Edit, job: Job) -> None:
        """From now on ``job``'s block runs beside every request."""
        self.home.enter()
        async with self._installing:  # one after the other, so that no two have one name
            number = self.prepare_edit(edit, job)
            try:
                await self._channel.install(number, job)
            except asyncio.CancelledError:
                self.end(self._uninstall([number]))
                raise
            edit.number = number
            self.installed.add(edit)

    async def clear(self, edits: Iterable[Edit]) -> None:
        if not self._closed:
            self.home.enter()
            await self._uninstall(self.installed.remove(edit.number for edit in edits))
            await self._sweep()

    async def generate(self, prompts: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
        """Plain requests; their outputs in the order of the prompts, once all have ended."""
        self._require_alive()
        self.home.enter()
        work = [self.prepare_plain(prompt, settings) for prompt in prompts]
        tasks = [asyncio.create_task(self.generated(one)) for one in work]
        try:
            return await asyncio.gather(*tasks)
        except Exception as error:
            raise self.failed(error) from None
        finally:
            for task in tasks:
                task.cancel()

    async def generated(self, prepared: Prepared) -> Any:
        """The output of a plain request, once it has ended."""
        await self._with_adapter(prepared)
        if prepared.tenant:
            Tag(whole=False, tenant=prepared.tenant).put_on(prepared.params)
        prepared.params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = self.llm.generate(prepared.prompt, prepared.params, uuid.uuid4().hex, lora_request=prepared.lora)
        async with aclosing(outputs):
            async for output in outputs:
                return output
        raise RequestError(ABORTED)

    async def _with_adapter(self, prepared: Prepared) -> None:
        if self._is_new(prepared.lora):
            self._fits(prepared.lora, await self._channel.call("insitu_fit", prepared.lora))

    async def begin(self, work: Sequence[tuple[Prepared, Job]]) -> Running:
        """Submits the jobs with their prompts, all together."""
        return Running(self, work, await self.ship(work))

    async def ship(self, work: Sequence[tuple[Prepared, Job]]) -> Shipment:
        """Has the workers take the jobs, whose requests are to follow."""
        self._require_alive()
        self.home.enter()
        for prepared, _ in work:
            await self._with_adapter(prepared)
        jobs = self._owned(work)
        shipping = asyncio.ensure_future(self._channel.submit(jobs))
        try:
            return await asyncio.shield(shipping)
        except asyncio.CancelledError:
            self.end(self._taken_back(shipping))
            raise

    async def run(self, work: Sequence[tuple[Prepared, Job]]) -> list[Result]:
        """Runs the jobs beside their prompts, all submitted together; returns when all have ended."""
        running = await self.begin(work)
        try:
            async for _ in running:
                pass
        except BaseException:
            running.abandon()
            raise
        return running.results

    async def collect(self, job: str, output: Any) -> list[Outcome]:
        """What the job of a finished request has come to. Those that end together are asked for together."""
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self._ended[job] = output, future
        if not self._collecting:
            self._collecting = True
            self.end(self._collect())
        return await future

    async def _collect(self) -> None:
        try:
            while self._ended:
                ended, self._ended = self._ended, {}
                outputs = {job: output for job, (output, _) in ended.items()}
                try:
                    outcomes = await self._channel.call("insitu_collect", outputs, jobs=list(outputs))
                except Exception as error:
                    outcomes = dict.fromkeys(outputs, error)
                for job, (_, future) in ended.items():
                    if not future.done():
                        _resolve(future, outcomes[job])
        finally:
            self._collecting = False

    async def _taken_back(self, shipping: asyncio.Future[Any]) -> None:
        shipment = await shipping
        await self._channel.drop([job.id for job in shipment.jobs], shipment)

    async def drop(self, jobs: Sequence[str], shipment: Any = None) -> None:
        await self._channel.drop(jobs, shipment)

    async def settle(self, shipment: Any) -> None:
        await self._channel.settle(shipment)

    def end(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Has something done that nobody awaits, but that ``in_flight`` waits for."""
        task = asyncio.get_running_loop().create_task(_quietly(coroutine))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def failed(self, error: Exception) -> Exception:
        """The error of a request, in place of the one that vLLM raised."""
        if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if not isinstance(error, EngineDeadError):
            return error
        self._failure = self._failure or error
        try:
            self._require_alive()
        except EngineError as said:
            return said
        return error

    def close(self) -> None:
        self._closed = True
        loop = self.home.loop
        if loop is not None and loop.is_running():  # vLLM leaves those waiting whose requests have not ended
            loop.call_soon_threadsafe(self.llm.output_processor.propagate_error, EngineDeadError())
        self.llm.shutdown(timeout=_GRACE)
        if loop is None or not loop.is_running():
            _close_sockets(self.llm)


def _resolve(future: asyncio.Future[list[Outcome]], outcome: Any) -> None:
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _close_sockets(llm: AsyncLLM) -> None:
    """vLLM leaves that to the loop; of one that does not run again they stay open, and Python waits for them."""
    resources: Any = getattr(llm.engine_core, "resources", None)
    for socket in vars(resources).values() if resources is not None else ():
        if isinstance(socket, zmq.Socket):
            zmq.Socket.close(socket, linger=0)


async def _quietly(coroutine: Coroutine[Any, Any, None]) -> None:
    """What can't be ended on an engine that has died has ended with it."""
    with contextlib.suppress(EngineError):
        await coroutine
