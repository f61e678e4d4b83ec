"""How a client calls its workers: directly in one process, or by messages."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from vllm.v1.engine.exceptions import EngineDeadError

from insitu.block import ArgumentError, EngineError, UnsavedWarning
from insitu.engine.job import Job
from insitu.run import Outcome
from insitu.wire import Port, apply, changeable, shortened

if TYPE_CHECKING:
    from insitu.engine.standin import ClientSide


class UnknownBlockError(EngineError):
    """A block was named that is not in the worker."""


class Call(msgspec.Struct, array_like=True):
    """One call of a worker's method. ``jobs`` is all that a rank which runs no blocks needs of it."""

    method: str
    jobs: list[str]
    message: bytes


encode: Callable[[Call], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Call] = msgspec.msgpack.Decoder(Call).decode


@dataclass
class Shipment:
    """Jobs that were submitted together, and all of their caller's objects that blocks can change."""

    jobs: list[Job]
    shared: list[Any] = field(default_factory=list)
    number: int = 0
    copy: int = 0
    """Which of several copies of the model has it."""


class Channel(Protocol):
    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        """What the method of the leading worker returns; raises what it raises."""
        ...

    def submit(self, jobs: Sequence[Job]) -> Shipment: ...

    def install(self, number: int, edit: Job) -> None:
        """Has an edit's block run beside the requests that carry its number."""
        ...

    def settle(self, shipment: Shipment) -> None:
        """To be called when the jobs have ended: objects of the caller are as they left them."""
        ...

    def drop(self, jobs: Sequence[str], shipment: Shipment | None = None) -> None:
        """Forgets jobs whose requests are gone, without a result; with a shipment, what is left of that, too."""
        ...

    def abandon(self) -> None:
        """To be called when a step has failed: a worker may wait for others that will never come."""
        ...

    def close(self) -> None:
        """To be called when the engine has shut down."""
        ...


class Direct:
    """The worker is in this process: values and blocks go by reference."""

    def __init__(self, llm: Any) -> None:
        (self._worker,) = llm.collective_rpc(_itself)
        self._worker.insitu_attach()

    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        return getattr(self._worker, method)(*args)

    def submit(self, jobs: Sequence[Job]) -> Shipment:
        self.call("insitu_submit", jobs)
        return Shipment(list(jobs))

    def install(self, number: int, edit: Job) -> None:
        self.call("insitu_install", number, edit)

    def settle(self, shipment: Shipment) -> None:
        pass

    def drop(self, jobs: Sequence[str], shipment: Shipment | None = None) -> None:
        self.call("insitu_drop", jobs)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def _itself(worker: Any) -> Any:
    return worker


def _sockets_of(llm: Any) -> list[Any]:
    """Those of vLLM's message queues, which it forgets when a worker has died, and Python then waits for at its end."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    queues = [getattr(executor, "rpc_broadcast_mq", None), *(getattr(executor, "response_mqs", None) or ())]
    contexts = [
        socket.context
        for queue in filter(None, queues)
        for socket in (queue.local_socket, queue.remote_socket)
        if socket is not None
    ]
    return [socket for context in contexts for socket in list(context._sockets)]


class Messages:
    """Calls of workers in other processes, maybe on other machines, as messages: made, and their answers read."""

    def __init__(self, side: ClientSide) -> None:
        self._port = Port(side.name, side.find)
        self._side = side
        self._numbers = itertools.count(1)

    def packed(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> bytes:
        return encode(Call(method, list(jobs), self._port.pack(args)))

    def answer(self, answers: Sequence[bytes | None]) -> Any:
        value, error = self._port.unpack(next(answer for answer in answers if answer))
        if error is not None:
            raise error
        return value

    def failed(self, error: Exception) -> EngineError:
        return EngineError(
            f"a worker process of the engine has failed, and the engine can't be used any more; make a new one. "
            f"{type(error).__name__}: {error}"
        )

    def shipped(self, jobs: Sequence[Job]) -> tuple[Shipment, bytes]:
        """The jobs with what belongs to them, and the message that takes them to the workers."""
        shared = changeable(part for job in jobs for part in job.parts.values())
        shipment = Shipment(list(jobs), shared, next(self._numbers))
        try:
            ids = [job.id for job in jobs]
            return shipment, self.packed("insitu_submit", list(jobs), shared, shipment.number, jobs=ids)
        except Exception:
            self.check_hindrance(jobs)
            raise

    def check_hindrance(self, jobs: Sequence[Job]) -> None:
        """To be called when jobs could not be sent: names what of them can't travel, if that is why."""
        self._side.forget_blocks()
        for name, part in {name: part for job in jobs for name, part in job.parts.items()}.items():
            if hindrance := self._port.hindrance(part):
                raise _cannot_travel(name, part, hindrance) from None

    def warn_of(self, lost: Any, jobs: Sequence[Job]) -> None:
        """Something was changed in the worker, and can't be changed here."""
        for job in jobs:
            for name, part in job.parts.items():
                if any(each is lost for each in changeable([part])):
                    what = f"`{name}`" if part is lost else f"{type(lost).__name__} of `{name}`"
                    warnings.warn_explicit(
                        f"{what} was changed in the block, in the engine's worker process, and the change can't be "
                        f"done to the caller's: make it in the block and write `x.save()` for what you need of it",
                        UnsavedWarning,
                        job.block.filename,
                        job.block.lineno,
                    )
                    return

    def put_back(self, shipment: Shipment, changes: dict[int, Any]) -> None:
        for lost in apply(shipment.shared, changes):
            self.warn_of(lost, shipment.jobs)


class Wired(Messages):
    """The workers are other processes, which are waited for."""

    def __init__(self, llm: Any, side: ClientSide) -> None:
        super().__init__(side)
        self._rpc = llm.collective_rpc
        self._sockets = _sockets_of(llm)
        self._abandoned = False
        self._rpc("insitu_open")

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()

    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        return self._sent(self.packed(method, *args, jobs=jobs))

    def _sent(self, message: bytes) -> Any:
        if self._abandoned:
            raise EngineError("a step of this engine has failed, and it can't be used any more; make a new one")
        try:
            answers = self._rpc("insitu_call", args=(message,))
        except Exception as error:
            raise self.failed(error) from error
        return self.answer(answers)

    def submit(self, jobs: Sequence[Job]) -> Shipment:
        shipment, message = self.shipped(jobs)
        try:
            self._sent(message)
        except Exception:
            self.check_hindrance(jobs)
            raise
        return shipment

    def install(self, number: int, edit: Job) -> None:
        try:
            self.call("insitu_install", number, edit)
        except Exception:
            self.check_hindrance([edit])
            raise

    def settle(self, shipment: Shipment) -> None:
        if shipment.shared:
            self.put_back(shipment, self.call("insitu_changes", shipment.number))

    def drop(self, jobs: Sequence[str], shipment: Shipment | None = None) -> None:
        self.call("insitu_drop", list(jobs), shipment.number if shipment else 0, jobs=list(jobs))


class AsyncWired(Messages):
    """The same, awaited. Messages arrive in the order in which they were sent."""

    copies: int = 1

    def __init__(self, llm: Any, side: ClientSide, enter: Callable[[], None], core: bytes | None = None) -> None:
        """``enter`` raises where the engine can't be called from. ``core``: which engine core, if there are several."""
        super().__init__(side)
        self._llm = llm
        self._enter = enter
        self._core = core

    async def open(self) -> None:
        await self._rpc("insitu_open")

    async def _rpc(self, method: str, *args: Any) -> Any:
        if self._core is None:
            return await self._llm.collective_rpc(method, args=args)
        # The public call goes to all cores, and gives the answer of the first.
        call: Any = self._llm.engine_core._call_utility_async
        return await call("collective_rpc", method, None, args, None, engine=self._core)

    async def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        self._enter()
        return await self._sent(self.packed(method, *args, jobs=jobs))

    async def _sent(self, message: bytes) -> Any:
        # vLLM never answers what it was asked when its engine died. If whoever asks is cancelled, it is asked still.
        asked = asyncio.ensure_future(self._rpc("insitu_call", message))
        asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        while not (await asyncio.wait([asked], timeout=1))[0]:
            if self._llm.engine_core.resources.engine_dead:
                asked.cancel()
                raise self.failed(EngineDeadError())
        try:
            answers = asked.result()
        except Exception as error:
            raise self.failed(error) from error
        return self.answer(answers)

    async def submit(self, jobs: Sequence[Job]) -> Shipment:
        shipment, message = self.shipped(jobs)
        try:
            await self._sent(message)
        except UnknownBlockError:  # one that was sent along with something that did not arrive
            self._side.forget_blocks()
            shipment, message = self.shipped(jobs)
            await self._sent(message)
        except Exception:
            self.check_hindrance(jobs)
            raise
        return shipment

    async def install(self, number: int, edit: Job) -> None:
        try:
            await self.call("insitu_install", number, edit)
        except Exception:
            self.check_hindrance([edit])
            raise

    async def settle(self, shipment: Shipment) -> None:
        if shipment.shared:
            self.put_back(shipment, await self.call("insitu_changes", shipment.number))

    async def drop(self, jobs: Sequence[str], shipment: Shipment | None = None) -> None:
        await self.call("insitu_drop", list(jobs), shipment.number if shipment else 0, jobs=list(jobs))


def _cannot_travel(name: str, part: Any, hindrance: BaseException) -> ArgumentError:
    return ArgumentError(
        f"`{name}` ({type(part).__name__}) can't travel to the engine's worker process, because pickle can't take it "
        f"({type(hindrance).__name__}: {hindrance}): make it in the block, or load the model without engine='workers'"
    )


def answered(port: Port, function: Callable[..., Any], message: bytes) -> bytes:
    """Calls ``function`` with what came, and packs what it returns or raises."""
    try:
        value = function(*port.unpack(message))
    except Exception as error:
        return _packed_error(error, port)
    try:
        return port.pack((value, None))
    except Exception as error:
        outcomes = value if isinstance(value, dict) else {}
        found = [each for each in chain.from_iterable(outcomes.values()) if isinstance(each, Outcome)]
        for outcome in found:
            _keep_what_travels(outcome, port)
        try:
            return port.pack((value, None)) if found else _packed_error(error, port)
        except Exception as other:
            return _packed_error(other, port)


def _packed_error(error: Exception, port: Port) -> bytes:
    if port.hindrance(error) is not None:
        error = shortened(error)
    return port.pack((None, error))


def _keep_what_travels(outcome: Outcome, port: Port) -> None:
    """What can't come home is this request's error, and nobody else's."""
    parts = {**outcome.saves, **outcome.bound, "what the function returned": outcome.returned}
    wrong = {name: hindrance for name, part in parts.items() if (hindrance := port.hindrance(part))}
    for name, hindrance in wrong.items():
        outcome.saves.pop(name, None)
        outcome.bound.pop(name, None)
        outcome.error = outcome.error or ArgumentError(
            f"`{name}` can't come home from the engine's worker process, because pickle can't take it "
            f"({type(hindrance).__name__}: {hindrance}): save the parts of it that you need"
        )
    if "what the function returned" in wrong:
        outcome.returned = None
    if outcome.error is not None and port.hindrance(outcome.error) is not None:
        outcome.error = shortened(outcome.error)
