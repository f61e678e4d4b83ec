"""``insitu.connect``: a model on a server, as its user holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from insitu.block import EngineError
from insitu.block.tracebacks import user_lines
from insitu.engine.check.report import CheckReport
from insitu.engine.client.base_model import MISSING, BaseModel, returned_by
from insitu.engine.client.edit import Edit, EditStatement, refuse_in_block
from insitu.engine.client.invokes import merged_error
from insitu.engine.client.prompts import are_several
from insitu.engine.client.trace import Trace
from insitu.engine.remote.engine import RemoteEngine
from insitu.engine.remote.http import Http
from insitu.net import Progress, RequestOutput
from insitu.tree import Listing


def connect(
    url: str,
    api_key: str | None = None,
    *,
    timeout: float = 600.0,
    progress: Callable[[Progress], object] | None = None,
) -> RemoteModel:
    """The model of a server that ``insitu serve`` runs; its ``trace`` and ``run`` are those of a model here.

    Needs neither vLLM nor a GPU. Values arrive as tensors if torch is installed, else as numpy's arrays. Blocks
    travel as source, and run under the server's allow-list. ``timeout``: seconds without an answer. ``progress`` is
    called now and then while a trace runs, with how many of its requests wait, run and have ended, and how many
    tokens there are. Raises
    ``EngineError`` if the server can't be reached or does not take the key, which is ``INSITU_API_KEY`` of the
    environment if it is left out.
    """
    return RemoteModel(url, api_key, timeout, progress).dispatch()


class RemoteModel(BaseModel[RemoteEngine]):
    """A model of a server's. Made by ``insitu.connect``."""

    _maker: ClassVar[str] = "insitu.connect"
    _later: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout: float,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        super().__init__(url, (), None, {})
        self._progress = progress
        self._http = Http(url, api_key, timeout)

    @property
    def about(self) -> dict[str, Any]:
        """What the server says of the model: its name, architecture, layers, width, vocabulary and dtype."""
        return {name: value for name, value in self._running().about.items() if name != "modules"}

    @user_lines
    def in_flight(self) -> int:
        """How many traced requests the server holds anything of, those of others too."""
        return self._running().stats()["in_flight"]

    @user_lines
    def stats(self) -> dict[str, int]:
        """How many steps took which path since the server started."""
        return self._running().stats()

    @user_lines
    def trace(self, prompt: Any = MISSING, **sampling: Any) -> Trace:
        """A ``with`` statement whose body runs at the server, beside the forward of ``prompt``; as ``VLLM.trace``."""
        engine: Any = self._running()
        return Trace(engine, None, [] if prompt is MISSING else [prompt], sampling)

    @user_lines
    def run(self, function: Callable[[Trace], Any], prompt: Any, **sampling: Any) -> Any:
        """``function(tracer)`` as the block beside ``prompt``; returns what it returns. As ``VLLM.run``."""
        several = are_several(prompt)
        engine: Any = self._running()
        trace = Trace(engine, None, prompt if several else [prompt], sampling)
        return returned_by(*trace.run_function(function), several)

    @user_lines
    def generate(self, prompts: Any, **sampling: Any) -> list[RequestOutput]:
        """Plain generation; one output for each of ``prompts``, with what edits saved in ``.saves``. As
        ``VLLM.generate``."""
        several = are_several(prompts)
        outputs = self._running().generate(prompts if several else [prompts], sampling)
        if (error := merged_error(outputs, "requests")) is not None:
            raise error
        return outputs

    @user_lines
    def check(self, prompts: Sequence[Any] | None = None, *, reference: bool = True, show: bool = True) -> CheckReport:
        """As ``VLLM.check``, done at the server. For keys that may install edits for everybody."""
        report = self._running().checked(prompts, reference)
        if show:
            report.show()
        return report

    @user_lines
    def edit(self, name: str | None = None) -> EditStatement:
        """A ``with`` statement whose body stays at the server, as ``VLLM.edit``'s.

        It runs beside every request of the server if this key may install such edits, and else beside the requests of
        this key. ``edit.clear()`` and ``clear_edits()`` take it off; it stays when this process has ended.
        """
        return EditStatement(self._running(), name)

    @user_lines
    def edits(self) -> list[Edit]:
        """The edits that run beside this key's requests, in their order, those of others too."""
        return self._running().installed

    @user_lines
    def clear_edits(self) -> None:
        """Takes off the server all edits that this key may: its own, and those for everybody if it may install such."""
        refuse_in_block("edits", "cleared")
        self._running().clear(None)

    def _start(self) -> RemoteEngine:
        engine = RemoteEngine(self._http, self)
        engine.progress = self._progress
        return engine

    def _listed(self, path: str, op: str) -> Listing | None:
        return self._running().operations(path, op)

    def __repr__(self) -> str:
        if self._closed:
            return f"insitu.connect({self._repo!r})  # closed"
        return super().__repr__()

    @property
    def vllm_entrypoint(self) -> Any:
        """There is none here."""
        raise EngineError("this model's engine is at its server: plain requests go to the server's OpenAI routes")
