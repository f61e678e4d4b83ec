"""Drives an in-process engine until a set of traced requests has ended."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from vllm.sampling_params import RequestOutputKind

from insitu.block import ArgumentError
from insitu.tree import current


@dataclass(frozen=True)
class Request:
    """One request, ready for vLLM. ``job`` is the id of its block's job, or any other key if it has none."""

    job: str
    prompt: dict[str, Any]
    params: Any
    lora: Any = None


_OF_TOKENS = {"prompt", "prompt_token_ids", "cache_salt"}
_THRESHOLDS = (50_000, 20, 1000)
_NOT_OURS = (signal.SIG_IGN, None)
_signals: Any = importlib.import_module("_signal")
"""``signal`` without its enumerations, in which it looks for each handler, to find by an exception that it is none."""


class FailedStepError(Exception):
    """A step of the engine itself has failed; the cause is vLLM's own error."""


class EngineLoop:
    """vLLM's synchronous engine, stepped for several owners.

    Outputs of requests that are not ours (added through ``vllm_entrypoint`` before) are kept, and
    handed to whoever steps the engine next: nothing of anybody else's is lost.

    The engine is for one thread, and so is a block once it runs: whoever holds ``turn`` has the engine for
    itself, and other threads that add requests or step wait.
    """

    def __init__(self, llm: Any, stamp: Callable[[Any], None], deliver: Callable[[Sequence[Any]], None]) -> None:
        """``stamp`` gets each request before vLLM's engine core does, ``deliver`` the outputs of each step."""
        self._llm = llm
        self._engine = llm.llm_engine
        self._kept: list[Any] = []
        self.turn: threading.RLock = threading.RLock()
        self._take_step: Callable[[], list[Any]] = self._engine.step
        self._deliver = deliver
        self._unfinished: Callable[[], bool] = self._engine.has_unfinished_requests
        self._add: Callable[..., Any] = self._engine.add_request
        self._engine.step = self._step_for_others
        self._engine.add_request = self._add_in_turn
        core = self._engine.engine_core
        core.add_request = _stamped(core.add_request, stamp)
        self._engine.has_unfinished_requests = lambda: bool(self._kept) or self._unfinished()
        self._full_step: int = _tokens_of_a_step(self._engine)

    def run(
        self,
        requests: Sequence[Request],
        finished: Callable[[Mapping[str, Any]], None],
        advance: Callable[[int], object],
    ) -> None:
        """Submits the requests together and calls ``finished`` with those that end in a step, outputs by job, and then
        ``advance`` with how many that are.

        Whatever way this is left (an error, ``KeyboardInterrupt``), no request of ours stays behind.
        """
        waiting: dict[str, str] = {}
        internal: list[str] = []

        def step() -> None:
            ended: dict[str, Any] = {}
            for output in self._checked_step():
                if output.request_id not in waiting:
                    self._kept.append(output)
                elif output.finished:
                    ended[waiting.pop(output.request_id)] = output
            if ended:
                finished(ended)
                advance(len(ended))
            check()

        try:
            with _young_garbage_only(), _interrupts_between_steps() as check:
                tokens = 0
                for request in requests:
                    name = self._enqueue(request)
                    internal.append(name)
                    waiting[self._external(name)] = request.job
                    check()
                    before, tokens = tokens, tokens + len(request.prompt.get("prompt_token_ids") or ())
                    if before <= self._full_step < tokens:
                        step()  # which goes on beside this thread while the others are submitted
                while waiting and self._unfinished():
                    step()
        finally:
            if waiting or len(internal) < len(requests):
                self._engine.abort_request(internal, internal=True)

    def _enqueue(self, request: Request) -> str:
        """vLLM's own name for it."""
        if self._engine.model_config.is_encoder_decoder or not request.prompt.keys() <= _OF_TOKENS:
            (name,) = self._llm.enqueue([request.prompt], [request.params], lora_request=request.lora, use_tqdm=False)
            return name
        # As enqueue, of token ids that are checked already.
        number, given = str(next(self._llm.request_counter)), cast("Any", {"type": "token", **request.prompt})
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        return self._engine.add_request(number, given, request.params, lora_request=request.lora)

    def _step(self) -> list[Any]:
        outputs = self._take_step()
        self._deliver(outputs)
        return outputs

    def _checked_step(self) -> list[Any]:
        try:
            return self._step()
        except Exception as error:
            raise FailedStepError from error

    def _external(self, name: str) -> str:
        """The id that outputs carry: vLLM adds a random suffix to the one it works with."""
        processor = self._engine.output_processor
        state = processor.request_states.get(name)
        if state is not None:
            return getattr(state, "external_req_id", name)
        return name.rpartition("-")[0] or name

    def _step_for_others(self) -> list[Any]:
        _refuse_in_block()
        with self.turn:
            kept, self._kept = self._kept, []
            outputs = kept + self._step() if self._unfinished() else kept
            for output in outputs:
                if isinstance(pressed := getattr(output, "error", None), KeyboardInterrupt):
                    raise pressed  # Ctrl-C came while an edit's own code ran
            return outputs

    def _add_in_turn(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_in_block()
        with self.turn:
            return self._add(*args, **kwargs)


def _tokens_of_a_step(engine: Any) -> int:
    """As many as a step has at most, where steps go on while the next is put together; elsewhere no number of tokens is
    that many."""
    core = getattr(engine.engine_core, "engine_core", None)
    overlap = getattr(core, "batch_queue", None) is not None
    return engine.vllm_config.scheduler_config.max_num_batched_tokens if overlap else sys.maxsize


def _stamped(add: Callable[[Any], Any], stamp: Callable[[Any], None]) -> Callable[[Any], Any]:
    def add_stamped(request: Any) -> Any:
        stamp(request)
        return add(request)

    return add_stamped


def _refuse_in_block() -> None:
    if current.get() is not None:
        raise ArgumentError(
            "an engine can't be run from inside a block, which waits for a step of it: call `generate` and the like "
            "before the `with` or after it, or give each prompt an invoke of its own"
        )


@contextmanager
def _young_garbage_only() -> Iterator[None]:
    """What blocks save piles up, and the collector would go through all of it again and again."""
    before = gc.get_threshold()
    gc.set_threshold(*_raised(before))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@lru_cache(1)
def _raised(thresholds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(own and max(own, least) for own, least in zip(thresholds, _THRESHOLDS, strict=True))


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back while vLLM is inside a step, which it does not survive being torn out of.

    In a block's own code it is raised at once, so that a block that never ends can be stopped.
    """
    if threading.get_ident() != threading.main_thread().ident or _signals.getsignal(signal.SIGINT) in _NOT_OURS:
        yield lambda: None
        return
    pressed = False

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        if current.get() is not None:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = _signals.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        _signals.signal(signal.SIGINT, before)
