"""The public face: a model that vLLM runs and that blocks read and edit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from insitu.block import ArgumentError
from insitu.block.errors import needing
from insitu.block.tracebacks import user_lines
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.base_model import MISSING, BaseModel, returned_by
from insitu.engine.client.edit import Edit, EditStatement, refuse_in_block
from insitu.engine.client.invokes import merged_error
from insitu.engine.client.prompts import are_several
from insitu.engine.client.trace import Trace
from insitu.tree import Listing

if TYPE_CHECKING:
    from vllm import RequestOutput

    from insitu.engine.check.report import CheckReport
    from insitu.engine.client.engine import Engine
    from insitu.engine.worker.stats import Stats

T = TypeVar("T")
_LATER: dict[str, str] = {
    "serve": "`insitu serve MODEL` starts a server, and `model.trace(..., serve=url)` runs a trace at one",
}


class Message(TypedDict):
    """One message of a chat."""

    role: str
    content: Any


class VLLM(BaseModel["Engine"]):
    """A model served by vLLM, whose insides blocks can read and edit.

    ``repo`` is a Hub id or a local folder; ``engine_args`` are whatever ``vllm.LLM`` takes. The model runs
    in this process, or, if it has several ranks or with ``engine="workers"``, in worker processes; blocks and
    values then travel. Returns at once, without importing torch or vLLM: the first trace, ``dispatch=True``
    or ``dispatch()`` builds the engine. Modules are attributes, by vLLM's own names::

        model = VLLM("Qwen/Qwen3-0.6B")
        with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1):
            hidden = model.model.layers[6].mlp.output.save()
            logits = model.logits.save()

    Raises ``ArgumentError`` for an engine argument that vLLM does not have and ``EngineError`` if
    there is no such model, both when the engine is built.
    """

    _later = _LATER

    @overload
    def __new__(cls, repo: str, *, mode: Literal["async"], **settings: Any) -> AsyncVLLM: ...  # type: ignore[misc]
    @overload
    def __new__(cls, repo: str, **settings: Any) -> VLLM: ...
    def __new__(cls, repo: str, *, mode: str = "sync", **settings: Any) -> Any:
        """With ``mode="async"``, an ``AsyncVLLM``, whose engine is awaited."""
        if mode not in ("sync", "async"):
            raise ArgumentError(f"mode={mode!r}: it is 'sync', which leaving it out means, or 'async'")
        return object.__new__(cls) if mode == "sync" else AsyncVLLM(repo, **settings)

    def __init__(
        self,
        repo: str,
        *,
        dispatch: bool = False,
        mode: str = "sync",
        taps: Sequence[str] = (),
        engine: Literal["in-process", "workers"] | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(repo, taps, engine, engine_args)
        self._servers: dict[str, Any] = {}
        if dispatch:
            self.dispatch()

    # -- the engine -----------------------------------------------------------------------

    @property
    def vllm_entrypoint(self) -> Any:
        """The real ``vllm.LLM``. Requests made through it run beside traced ones, untouched."""
        return self._running().llm

    def in_flight(self) -> int:
        """How many traced requests the engine still holds anything of; 0 once all have ended."""
        return self._engine.in_flight() if self._engine else 0

    def stats(self) -> Stats:
        """How many steps took which path since the engine started."""
        return self._running().stats()

    @user_lines
    def check(self, prompts: Sequence[Any] | None = None, *, reference: bool = True, show: bool = True) -> CheckReport:
        """Whether what blocks see of this model is right, on this engine, with a few prompts or those given.

        Every standard name at every layer, the logits, and a sample of modules are compared with what
        transformers computes in the same dtype (a second copy of the model, on the CPU, for as long as
        this takes); with what each is the sum of; and alone with in a batch. Where transformers can't run
        the model, or with ``reference=False``, all but the first. The bound on differences, by norm and
        relative, is twice the error that transformers itself has in this dtype, and 1e-5 in float32 or a
        rounding step in others. ``show`` prints a table.
        """
        if self.edits():
            raise ArgumentError("the model is checked as it is: clear its edits first, `model.clear_edits()`")
        report = _check(self, reference, prompts)
        if show:
            report.show()
        return report

    def _start(self) -> Engine:
        # Imported here: vLLM takes seconds to import, and a model that is only made does not pay for it.
        engine = _starter()(self._repo, self._engine_args, self._taps, self, self._workers)
        if self._taps:
            _check_taps(engine, self._lock)
        return engine

    # -- running blocks -------------------------------------------------------------------

    @user_lines
    def trace(
        self,
        prompt: Any = MISSING,
        *,
        serve: str | None = None,
        keep_on: Literal["device"] | None = None,
        progress: bool = True,
        **sampling: Any,
    ) -> Trace:
        """A ``with`` statement whose body runs beside the forward of ``prompt``.

        ``prompt``: a string, token ids, a tokenizer's output, a vLLM prompt dictionary or a chat.
        Without one, the body opens ``tracer.invoke(prompt)`` for each of several. ``sampling``: the
        fields of vLLM's ``SamplingParams``, ``max_new_tokens`` (= ``max_tokens``) and
        ``lora_request``. ``serve``: the address of a server to run this trace at, as ``insitu.connect`` would.
        ``keep_on="device"``: what is saved stays on the engine's device, as tensors that are the caller's alone; for
        engines in this process. ``progress``: whether 100 requests or more show a bar, in a terminal or a notebook.

        Raises ``PromptError`` and ``ArgumentError`` before anything runs; an exception in the body
        is raised when the ``with`` statement is left, on the body's own line.
        """
        prompts = [] if prompt is MISSING else [prompt]
        if serve is not None:
            if keep_on is not None:
                raise ArgumentError(
                    "keep_on: with `serve` values come from a server, whose device is another process's"
                )
            return Trace(self._served(serve), None, prompts, sampling)
        return Trace(self._running(), self._lock, prompts, sampling, keep_on, progress)

    def _served(self, url: str) -> Any:
        from insitu.engine.remote.engine import RemoteEngine
        from insitu.engine.remote.http import Http

        if url not in self._servers:
            self._servers[url] = RemoteEngine(Http(url, None, 600.0), self)
        return self._servers[url]

    @overload
    def run(self, function: Callable[[Trace], Any], prompt: Any, *, n: int, **sampling: Any) -> Any: ...
    @overload
    def run(self, function: Callable[[Trace], T], prompt: str | list[int] | list[Message], **sampling: Any) -> T: ...
    @overload
    def run(self, function: Callable[[Trace], T], prompt: list[str] | list[list[int]], **sampling: Any) -> list[T]: ...
    @overload
    def run(self, function: Callable[[Trace], T], prompt: Mapping[str, Any], **sampling: Any) -> T: ...
    @overload
    def run(self, function: Callable[[Trace], T], prompt: Any, **sampling: Any) -> Any: ...
    @user_lines
    def run(
        self,
        function: Callable[[Trace], Any],
        prompt: Any,
        *,
        keep_on: Literal["device"] | None = None,
        progress: bool = True,
        **sampling: Any,
    ) -> Any:
        """``function(tracer)`` as the block beside ``prompt``; returns what it returns.

        For a list of prompts (strings, lists of ids), a list of what it returned for each. Nothing
        needs to be saved. Works where a block's source can't be found. ``keep_on`` and ``progress`` as for ``trace``.
        """
        several = are_several(prompt)
        prompts = prompt if several else [prompt]
        trace = Trace(self._running(), self._lock, prompts, sampling, keep_on, progress)
        returned, error = trace.run_function(function)
        return returned_by(returned, error, several)

    @user_lines
    def generate(self, prompts: Any, *, progress: bool = True, **sampling: Any) -> list[RequestOutput]:
        """Plain generation; one ``RequestOutput`` for each of ``prompts`` (one prompt, or a list of them).

        What installed edits saved is in ``output.saves``, by name, and for each sequence in the ``saves`` of
        its completion. ``sampling`` and ``progress`` are as for ``trace``. Raises what an edit raised beside one of
        the requests once all have ended, an ``ExceptionGroup`` if that are several; each has ``.invoke``, the prompt's
        index.
        """
        several = are_several(prompts)
        with self._lock:
            outputs = self._running().generate(prompts if several else [prompts], sampling, progress)
        error = merged_error(outputs, "requests")
        if error is not None:
            raise error
        return outputs

    # -- edits ----------------------------------------------------------------------------

    @user_lines
    def edit(self, name: str | None = None) -> EditStatement:
        """A ``with`` statement whose body stays on the engine, to run beside every request from then on::

            with model.edit("steer") as (tracer, edit):
                for step in tracer.all():
                    model.resid_post[6][:] += vector

        That means those of ``trace``, ``run`` and ``generate`` and of ``vllm_entrypoint``; a request may name
        those that it wants with ``edits=[names]``, and gets them and all unnamed ones. What the body reads of
        its caller it keeps as it is now; nothing is bound in the caller, and what it saves comes on the output
        of each request as ``output.saves``.
        """
        return EditStatement(self._running(), name)

    def edits(self) -> list[Edit]:
        """The installed edits, in the order in which they run."""
        return list(self._engine.installed) if self._engine else []

    @user_lines
    def clear_edits(self) -> None:
        """Takes all edits off the engine. Requests that came before keep theirs to their end."""
        refuse_in_block("edits", "cleared")
        if self._engine is not None:
            self._engine.clear(self._engine.installed)

    def _listed(self, path: str, op: str) -> Listing | None:
        return self._engine.operations(path, op) if self._engine else None


def _starter() -> Any:
    with needing():
        from insitu.engine.client.start import start

    return start


def _check(model: VLLM, reference: bool, prompts: Sequence[Any] | None) -> CheckReport:
    # Imported here, because it needs torch.
    with needing():
        from insitu.engine.check.check import check

    return check(model, model._running(), model.run, prompts, reference)


def _check_taps(engine: Engine, lock: threading.RLock) -> None:
    from insitu.engine.taps.check import check_taps

    try:
        check_taps(engine, lock)
    except BaseException:
        engine.close()
        raise
