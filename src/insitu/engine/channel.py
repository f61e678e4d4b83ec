"""How a client calls its workers: directly in one process, or by messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from insitu.block import ArgumentError, EngineError, UnsavedWarning
from insitu.engine.job import Job
from insitu.run import Outcome
from insitu.wire import Port, apply, changeable, shortened

if TYPE_CHECKING:
    from insitu.engine.standin import ClientSide


class Call(msgspec.Struct, array_like=True):
    """One call of a worker's method. ``jobs`` is all that a rank which runs no blocks needs of it."""

    method: str
    jobs: list[str]
    message: bytes


encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Call).decode


class Channel(Protocol):
    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        """What the method of the leading worker returns; raises what it raises."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def close(self) -> None:
        """To be called when the engine has shut down."""
        ...

    def settle(self) -> None:
        """To be called when the submitted jobs have ended: objects of the caller are as they left them."""
        ...


class Direct:
    """The worker is in this process: values and blocks go by reference."""

    def __init__(self, llm: Any) -> None:
        self._rpc = llm.collective_rpc
        self._rpc("insitu_attach")

    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        return self._rpc(method, args=args)[0]

    def submit(self, jobs: Sequence[Job]) -> None:
        self.call("insitu_submit", jobs)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


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


class Wired:
    """The workers are other processes, and may be on other machines."""

    def __init__(self, llm: Any, side: ClientSide) -> None:
        self._rpc = llm.collective_rpc
        self._port = Port(side.name, side.find)
        self._side = side
        self._shared: list[Any] = []
        self._jobs: list[Job] = []
        self._sockets = _sockets_of(llm)
        self._rpc("insitu_open")

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()

    def call(self, method: str, *args: Any, jobs: Sequence[str] = ()) -> Any:
        message = encode(Call(method, list(jobs), self._port.pack(args)))
        try:
            answers = self._rpc("insitu_call", args=(message,))
        except Exception as error:
            self._shared, self._jobs = [], []
            raise EngineError(
                f"a worker process of the engine has failed, and the engine can't be used any more; make a new one. "
                f"{type(error).__name__}: {error}"
            ) from error
        value, error = self._port.unpack(next(answer for answer in answers if answer))
        if error is not None:
            raise error
        return value

    def submit(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._shared = changeable(part for job in jobs for part in job.parts.values())
        try:
            self.call("insitu_submit", list(jobs), self._shared, jobs=[job.id for job in jobs])
        except Exception:
            self._side.forget_blocks()
            for name, part in {name: part for job in jobs for name, part in job.parts.items()}.items():
                if hindrance := self._port.hindrance(part):
                    raise _cannot_travel(name, part, hindrance) from None
            raise

    def settle(self) -> None:
        if self._shared:
            shared, self._shared = self._shared, []
            for lost in apply(shared, self.call("insitu_changes")):
                self._warn_of(lost)
        self._jobs = []

    def _warn_of(self, lost: Any) -> None:
        """Something was changed in the worker, and can't be changed here."""
        for job in self._jobs:
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
