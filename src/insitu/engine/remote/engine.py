"""An engine that is a server's: traces are sent to it, and what they saved comes back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from insitu.block import ArgumentError, EngineError, Lost, RequestError
from insitu.engine.check.report import CheckReport, Row
from insitu.engine.client.edit import Edit, EditTracer
from insitu.engine.client.plan import BaseTrace
from insitu.engine.job import Job
from insitu.engine.remote.http import Http
from insitu.net import (
    CONTENT_TYPE,
    Done,
    Failed,
    Named,
    Output,
    Progress,
    Saves,
    TraceBuilder,
    TraceRequest,
    decode_event,
    encode_frame,
)
from insitu.tree import Listing, Module, Node, Outline, path_of
from insitu.tree.source import Operation


@dataclass(frozen=True)
class Prompted:
    """A prompt and its sampling settings, which the server checks."""

    prompt: Any
    settings: Mapping[str, Any]


@dataclass
class RemoteResult:
    """What one request left."""

    saves: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: BaseException | None = None
    lost: Sequence[Lost] = ()

    def bound(self, name: str) -> dict[str, Any]:
        """Only what was saved comes back."""
        return {name: self.saves[name]} if name in self.saves else {}


class RemoteEngine:
    """The engine of a connected model."""

    def __init__(self, http: Http, model: Any) -> None:
        self._http = http
        self._model = model
        self.about: dict[str, Any] = http.get("model")
        modules = self.about["modules"].items()
        self.outline: Outline = Outline(
            {path: Module(kind, tuple(children), note) for path, (kind, children, note) in modules}
        )
        self.layers: int = self.about["layers"]
        self._tokenizer: Any = None
        self._edits: dict[int, Edit] = {}
        self.progress: Callable[[Progress], object] | None = None

    @property
    def tokenizer(self) -> Any:
        """As transformers has it, which is needed for it here."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._http.get("tokenizer"))
        return self._tokenizer

    def stats(self) -> dict[str, int]:
        return self._http.get("stats")

    def check(self, settings: Mapping[str, Any]) -> None:
        """The server does."""

    def prepare(self, prompt: Any, settings: Mapping[str, Any]) -> Prompted:
        return Prompted(prompt, settings)

    prepare_early = prepare

    def prepare_all(self, prompts: Sequence[Any], settings: Mapping[str, Any]) -> list[Prompted]:
        return [Prompted(prompt, settings) for prompt in prompts]

    def complete(self, work: Sequence[Prompted]) -> None:
        """The server finds the tokens."""

    def refused(self, error: BaseException) -> RemoteResult:
        return RemoteResult(error=error)

    def bring_home(self, values: Mapping[str, Any], keep: bool = False) -> dict[str, Any]:
        return dict(values)

    def run(self, work: Sequence[tuple[Any, Job]]) -> list[RemoteResult]:
        """Sends the jobs with their prompts; returns when all have ended."""
        builder = TraceBuilder(self._named)
        for prompted, job in work:
            block: Any = getattr(job.block, "fn", job.block)
            builder.add(prompted.prompt, block, job.values, prompted.settings, sorted(job.shared))
        results: dict[int, RemoteResult] = {}
        for event in self._events("trace", builder.request()):
            if isinstance(event, Progress) and self.progress is not None:
                self.progress(event)
            if isinstance(event, Failed) and event.invoke is None:
                return [RemoteResult(error=event.error) for _ in work]
            if isinstance(event, Failed):
                results[event.invoke or 0] = RemoteResult(error=event.error)
            elif isinstance(event, Saves):
                lost = [Lost(*one) for one in event.lost]
                results[event.invoke] = RemoteResult(dict(event.values), event.returned, None, lost)
        return [results.get(number, RemoteResult(error=_missing())) for number in range(len(work))]

    def generate(self, prompts: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
        """Plain requests; their outputs in the order of the prompts, once all have ended."""
        builder = TraceBuilder(self._named)
        for prompt in prompts:
            builder.add(prompt, None, sampling=settings)
        outputs: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        for event in self._events("generate", builder.request(kind="generate")):
            if isinstance(event, Failed) and event.invoke is None:
                raise event.error
            if isinstance(event, Failed):
                failed[event.invoke or 0] = event.error
            elif isinstance(event, Output):
                outputs[event.invoke] = event.output
        for number, error in failed.items():
            outputs[number].error = error
        if len(outputs) < len(prompts):
            raise _missing()
        return [outputs[number] for number in range(len(prompts))]

    def _events(self, route: str, request: TraceRequest) -> Iterator[Any]:
        """What is answered, up to its end. Raises ``EngineError`` if it breaks off before."""
        arrays: Any = "torch" if importlib.util.find_spec("torch") else "numpy"
        over = False
        for frame in self._http.post(route, encode_frame(request.frame())):
            event = decode_event(frame, arrays=arrays)
            over = over or isinstance(event, Done)
            yield event
        if not over:
            raise EngineError(f"the server {self._http.url} broke off in the middle of this trace")

    def operations(self, path: str, op: str) -> Listing:
        """The operations in a module's forward, or in what one of them calls."""
        found = self._http.get("source", path=path, op=op)
        operations = tuple(Operation(**one) for one in found["operations"])
        return Listing(found["title"], found["first"], tuple(found["lines"]), operations)

    def checked(self, prompts: Sequence[Any] | None, reference: bool) -> CheckReport:
        """What the server finds when it checks its model."""
        body = json.dumps({"prompts": prompts, "reference": reference}).encode()
        found = self._http.send("POST", "check", body)
        rows = tuple(Row(**row) for row in found["rows"])
        return CheckReport(found["model"], found["dtype"], found["reference"], rows, tuple(found["not_compared"]))

    # -- edits ----------------------------------------------------------------------------

    @property
    def installed(self) -> list[Edit]:
        """Those beside this key's requests, in the order in which they run."""
        return [self._edit(one) for one in self._http.get("edits")["edits"]]

    def install(self, edit: Edit, job: Job) -> None:
        """From now on ``job``'s block runs beside the requests that this key's edits are for."""
        builder = TraceBuilder(self._named)
        builder.add(None, job.block, job.values)  # type: ignore[arg-type]
        body = encode_frame(builder.request(kind="edit").frame())
        name = {} if edit.name is None else {"name": edit.name}
        found = self._http.send("POST", "edits", body, CONTENT_TYPE, **name)
        edit.number, edit.same_for_rows = found["number"], found["same_for_rows"]
        self._edits[edit.number] = edit

    def clear(self, edits: Iterable[Edit] | None) -> None:
        """Takes these off the server; None: all that this key may."""
        if edits is None:
            self._http.send("DELETE", "edits")
            return
        here = {edit.number for edit in self.installed}
        for edit in edits:
            if edit.number in here:
                self._http.send("DELETE", f"edits/{edit.number}")

    def _edit(self, about: Mapping[str, Any]) -> Edit:
        number = about["number"]
        if number not in self._edits:
            self._edits[number] = edit = Edit(self, about["name"])  # type: ignore[arg-type]
            edit.number, edit.same_for_rows = number, about["same_for_rows"]
        return self._edits[number]

    def close(self) -> None:
        """Nothing is held here of the server's."""

    def _named(self, value: Any) -> Named | None:
        if value is self._model:
            return Named("model")
        if isinstance(value, (BaseTrace, EditTracer)):
            return Named("tracer")
        if isinstance(value, Node):
            if value._lister != self._model._owner:
                raise ArgumentError(f"`{path_of(value)}` belongs to another model than the one that is traced")
            return Named("node", path_of(value))
        return None


def _missing() -> RequestError:
    return RequestError("the server said nothing of this request")


def _tokenizer(about: Mapping[str, Any]) -> Any:
    try:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise EngineError(f"the tokenizer needs `{error.name}` here: pip install transformers") from error
    made: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(about["tokenizer"]), **about["special"])
    made.chat_template = about["chat_template"]
    return made
