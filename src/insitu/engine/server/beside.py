"""What runs beside the requests of OpenAI's own routes: a form in their ``insitu`` field, and installed edits.

Both leave what they save on the choices of the answer, in a field of the same name.
"""

from __future__ import annotations

import copy
import json
import sys
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from vllm.entrypoints.generate.base.serving import GenerationError  # pyright: ignore[reportPrivateImportUsage]
from vllm.sampling_params import RequestOutputKind

from insitu.block import ArgumentError, InsituError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.engine import request_of
from insitu.engine.client.result import Result
from insitu.engine.server import metrics
from insitu.engine.server.access import Access, RefusedError, kept
from insitu.engine.server.forms import beside_edits, job_of
from insitu.engine.server.plain import all_as_json
from insitu.engine.tag import ASKED, without_tag
from insitu.guard import GuardLimits
from insitu.net import WireError, WireLimits
from insitu.net.errors import FormError
from insitu.net.form import parsed
from insitu.net.form_block import FormBlock, form_block
from insitu.net.frames import decode_json

FIELD = "insitu"
_DONE = "data: [DONE]\n\n"


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    """What the field may hold: a form, and names of installed edits."""

    actions: list[dict[str, Any]] | None = None
    edits: list[str] | None = None


class EditError(GenerationError):
    """An edit failed beside a request of a route that has no place for what edits leave."""


class BesideError(Exception):
    """A request can't run; ``Beside.error`` says why."""


@dataclass
class Beside:
    """One call of OpenAI's: what runs beside its requests, and what that left."""

    block: FormBlock | None = None
    edits: list[str] | None = None
    asked: bool = False
    """Whether the call has the field, and so is counted."""
    told: bool = True
    """Whether its answer has a place for what is left."""
    call: str = field(default_factory=lambda: uuid.uuid4().hex)
    held: ExitStack = field(default_factory=ExitStack)
    """What is to be closed when it has been answered."""
    left: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    """For each request, and in it by sequence, saved values as JSON."""
    error: BaseException | None = None

    def take(self, number: int, output: Any, read: Mapping[int, Mapping[str, Any]]) -> None:
        """What edits saved is on the completions; ``read`` is what the form did."""
        if output.error is not None:
            self.error = self.error or output.error
            return
        try:
            for one in output.outputs:
                saves = beside_edits(vars(one).get("saves", {}), read.get(one.index, {}))
                metrics.saved(saves)
                self.left[number][one.index] = all_as_json(saves)
        except ArgumentError as error:
            self.error = self.error or error

    def count_failure(self) -> None:
        if self.asked:
            metrics.FAILURES.labels("openai").inc()

    def choices(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The index of each choice and what was saved beside it."""
        index = 0
        for completions in self.left:
            for number in sorted(completions):
                yield index, completions[number]
                index += 1


asked_beside: ContextVar[Beside | None] = ContextVar("asked_beside", default=None)


class BesideOpenAI:
    """Stands around vLLM's handlers of completions and chats, and around its engine's ``generate``."""

    def __init__(self, model: AsyncVLLM, access: Access) -> None:
        self._model = model
        self._access = access
        self._engine: Any = model._running()
        self._generate = self._engine.llm.generate

    def watch(self, state: Any) -> None:
        """``state``: that of vLLM's app, with its handlers."""
        for handler, name in (
            (state.openai_serving_completion, "create_completion"),
            (state.openai_serving_chat, "create_chat_completion"),
        ):
            if handler is not None:
                setattr(handler, name, partial(self._answered, handler, getattr(handler, name)))
        self._engine.llm.generate = self._generated

    # -- calls ----------------------------------------------------------------------------

    async def _answered(self, handler: Any, create: Any, request: Any, raw_request: Any = None) -> Any:
        asked = (request.model_extra or {}).get(FIELD)
        if asked is None and not self._engine.installed:
            return await create(request, raw_request)
        try:
            if asked is not None:
                await _require_single_keys(raw_request)
            beside = self._beside(request, asked, raw_request)
        except RefusedError as error:
            metrics.FAILURES.labels("openai").inc()
            return handler.create_error_response(str(error), error.code, HTTPStatus(error.status), FIELD)
        except (InsituError, ValueError) as error:
            metrics.FAILURES.labels("openai").inc()
            return _refusal(handler, error)
        with beside.held as held:
            try:
                answer = await self._run(create, request, raw_request, beside)
            except Exception:
                beside.count_failure()
                raise
            if beside.error is not None:
                beside.count_failure()
                return _refusal(handler, beside.error)
            if hasattr(answer, "__aiter__"):
                return kept(_streamed(handler, answer, beside), held.pop_all())
        for index, saves in beside.choices():
            if saves and index < len(getattr(answer, "choices", ())):
                setattr(answer.choices[index], FIELD, {"saves": saves})
        return answer

    async def _run(self, create: Any, request: Any, raw_request: Any, beside: Beside) -> Any:
        token = asked_beside.set(beside)
        try:
            return await create(request, raw_request)
        except BesideError:
            return None
        finally:
            asked_beside.reset(token)

    def _beside(self, request: Any, asked: Any, raw_request: Any) -> Beside:
        if asked is None:
            return Beside(told=not request.use_beam_search)
        key = self._access.key(raw_request)
        try:
            found = msgspec.convert(asked, _Field)
        except msgspec.ValidationError as error:
            raise FormError(str(error), "unknown-key" if "unknown field" in str(error) else "invalid") from None
        if found.edits is not None and ASKED in (request.vllm_xargs or {}):
            raise FormError(f"edits are named here or in vllm_xargs' {ASKED}, not in both", "invalid", "$.edits")
        self._engine.installed.chosen(found.edits)
        metrics.TRACES.labels("openai").inc()
        if found.actions is None:
            return Beside(edits=found.edits, asked=True, told=not request.use_beam_search)
        if request.use_beam_search:
            raise FormError("a form can't run beside beam search, which makes many requests of one", "not-supported")
        form = parsed({"actions": found.actions})
        block = form_block(form, self._model, GuardLimits().of_key(key.limits).saved_bytes)
        return Beside(block, found.edits, True, held=self._access.admitted(key))

    # -- requests -------------------------------------------------------------------------

    def _generated(self, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        beside = asked_beside.get()
        if beside is None:
            return self._generate(prompt, params, *args, **kwargs)
        if params.extra_args:  # some routes take them whole from the client, who may not say whose edits run
            params.extra_args = without_tag(params.extra_args)
        if beside.edits is not None:
            params.extra_args = {**(params.extra_args or {}), ASKED: beside.edits}
        beside.left.append({})
        number = len(beside.left) - 1
        if beside.block is None:
            return self._under_edits(beside, number, self._generate(prompt, params, *args, **kwargs))
        return self._under_form(beside, number, prompt, params, *args, **kwargs)

    async def _under_edits(self, beside: Beside, number: int, outputs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished and beside.told:
                    beside.take(number, output, {})
                elif output.finished and output.error is not None:
                    raise EditError(_told(output.error))
                yield output

    async def _under_form(
        self, beside: Beside, number: int, prompt: Any, params: Any, *args: Any, lora_request: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        try:
            prepared = self._engine.adopted(prompt, params, lora_request)
            assert beside.block is not None
            job = job_of(self._engine, beside.block, beside.call)
            shipment = await self._engine.ship([(prepared, job)])
        except (InsituError, ValueError) as error:
            beside.error = error
            raise BesideError(str(error)) from None
        request = request_of(prepared, job)
        outputs = self._generate(request.prompt, request.params, *args, lora_request=lora_request, **kwargs)
        completions: dict[int, Any] = {}
        steps: Counter[int] = Counter()
        held = [job.id]
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    completions.update((one.index, one) for one in output.outputs)
                    for one in output.outputs:
                        so_far = steps[one.index] if params.output_kind == RequestOutputKind.DELTA else 0
                        steps[one.index] = so_far + len(one.token_ids)
                    if output.finished and not any(one.finish_reason == "abort" for one in output.outputs):
                        held = []
                        whole = _with_all(output, completions)
                        result = Result(await self._engine.collect(job.id, whole), whole)
                        if result.error is not None:
                            beside.error = beside.error or result.error
                        else:
                            read = {
                                at: beside.block.within(outcome.returned, steps[at])
                                for at, outcome in enumerate(result.outcomes)
                            }
                            beside.take(number, whole, read)
                    yield output
        finally:
            self._engine.end(self._engine.drop(held, shipment))


async def _require_single_keys(raw_request: Any) -> None:
    """Of a key that comes twice, vLLM takes the last without a word."""
    try:
        decode_json(await raw_request.body(), WireLimits(header=sys.maxsize))
    except WireError as error:
        raise FormError(str(error), error.code) from None


def _with_all(output: Any, completions: Mapping[int, Any]) -> Any:
    """The last output of several sequences, which holds the one that ended last, with all of them."""
    whole = copy.copy(output)
    whole.outputs = [completions[index] for index in sorted(completions)]
    return whole


async def _streamed(handler: Any, chunks: AsyncIterator[str], beside: Beside) -> AsyncGenerator[str, None]:
    """The chunks of an answer, and before its end one more for each choice beside which something was saved."""
    head: dict[str, Any] | None = None
    async for chunk in chunks:
        if chunk == _DONE:
            for made in _last_chunks(handler, head or {}, beside):
                yield f"data: {json.dumps(made)}\n\n"
        elif head is None:
            found = json.loads(chunk.removeprefix("data: "))
            if "error" in found and beside.error is not None:
                continue
            head = {name: found[name] for name in ("id", "object", "created", "model") if name in found}
        yield chunk


def _last_chunks(handler: Any, head: Mapping[str, Any], beside: Beside) -> Iterator[Any]:
    if beside.error is not None:
        beside.count_failure()
        yield _refusal(handler, beside.error).model_dump()
        return
    empty = {"delta": {}} if head.get("object") == "chat.completion.chunk" else {"text": ""}
    for index, saves in beside.choices():
        if saves:
            choice = {"index": index, **empty, "logprobs": None, "finish_reason": None, FIELD: {"saves": saves}}
            yield {**head, "choices": [choice]}


def _refusal(handler: Any, error: BaseException) -> Any:
    """An error object of OpenAI's form: ``type`` is insitu's code, and ``param`` where in the field."""
    if isinstance(error, FormError):
        where = FIELD + error.path.removeprefix("$")
        return handler.create_error_response(error.args[0], error.code, HTTPStatus.BAD_REQUEST, where)
    status = HTTPStatus.BAD_REQUEST if isinstance(error, InsituError) else HTTPStatus.INTERNAL_SERVER_ERROR
    return handler.create_error_response(_told(error), type(error).__name__, status, FIELD)


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, InsituError) else f"{type(error).__name__}: {error}"
