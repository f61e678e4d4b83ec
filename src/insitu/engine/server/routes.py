"""The routes: what is asked over HTTP, who may ask it, and the answers as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from inspect import signature
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu._version import __version__
from insitu.block import InsituError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.server import forms, metrics, openapi
from insitu.engine.server.access import Access, RefusedError
from insitu.engine.server.answers import Frames
from insitu.engine.server.checks import Checks
from insitu.engine.server.edits import Edits
from insitu.engine.server.traces import Traces, beside_loop
from insitu.net import (
    CONTENT_TYPE,
    Key,
    Permission,
    TraceRequest,
    WireError,
    decode_frame,
)
from insitu.net.form import schema

PREFIX = "/insitu/v1"


class _Route(APIRoute):
    """Answers what was refused. Not by a handler of the app, which answers every exception in its own way.

    An endpoint that takes the request alone is called as it is: what else FastAPI does for it takes longer than some.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        if list(signature(endpoint).parameters) == ["request"]:
            self.app = _plain(endpoint)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except RefusedError as error:
                return error.response()

        return handled


def _plain(endpoint: Callable[[Request], Coroutine[Any, Any, Any]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await endpoint(Request(scope, receive, send))
        except RefusedError as error:
            response = error.response()
        await response(scope, receive, send)

    return app


def router(model: AsyncVLLM, traces: Traces, access: Access) -> APIRouter:
    """insitu's routes."""
    made = APIRouter(prefix=PREFIX, tags=["insitu"], route_class=_Route)
    edits, checks = Edits(model, traces), Checks(model)

    async def _asked(request: Request, kind: str) -> TraceRequest:
        body = await _body(request, traces.wire.header + traces.wire.tensors)
        try:
            asked = await beside_loop(lambda: TraceRequest.of_frame(decode_frame(body, traces.wire)), len(body))
            asked = dataclasses.replace(asked, size=len(body))
        except WireError as error:
            raise RefusedError(400, error.code, str(error)) from None
        if asked.kind != kind:
            raise RefusedError(400, "unknown", f"this route takes a {kind!r}, and {asked.kind!r} has come")
        return asked

    async def _frames(request: Request, key: Key, kind: str, run: Callable[[TraceRequest, Key], Any]) -> Frames:
        with access.admitted(key) as held:
            asked = await _asked(request, kind)
            return Frames(run(asked, key), kind, held.pop_all())

    @made.get("/model", summary="The module tree", **openapi.PLAIN)
    async def tree(request: Request) -> Response:
        access.key(request)
        return JSONResponse(described(model))

    @made.get("/tokenizer", summary="The tokenizer, as a tokenizer.json", **openapi.PLAIN)
    async def tokenizer(request: Request) -> Response:
        access.key(request)
        return tokenizer_of(model)

    @made.get("/stats", summary="Steps by path, and traces in flight", **openapi.PLAIN)
    async def stats(request: Request) -> Response:
        access.key(request)
        return JSONResponse({**dataclasses.asdict(await model.stats()), "in_flight": await model.in_flight()})

    @made.get("/source", summary="The operations in the forward of a module, or in one of them", **openapi.PLAIN)
    async def source(request: Request, path: str, op: str = "") -> Response:
        access.key(request)
        if path not in model._running().outline.modules:
            raise RefusedError(404, "UnknownModuleError", f"the model has no module {path!r:.100}")
        try:
            return JSONResponse(dataclasses.asdict(await model.listing(path, op)))
        except InsituError as error:
            raise RefusedError(404, type(error).__name__, str(error)) from None

    @made.post("/check", summary="Compares what blocks see of the model with transformers", **openapi.CHECK)
    async def check(request: Request) -> Response:
        key = access.key(request, Permission.BLOCKS)
        return JSONResponse(await checks.run(key, await _body(request, traces.wire.header)))

    @made.post("/trace", summary="Runs blocks beside prompts", response_class=Response, **openapi.FRAMES)
    async def trace(request: Request) -> Any:
        key = access.key(request, Permission.BLOCKS)
        return await _frames(request, key, "trace", traces.run)

    @made.post("/generate", summary="Runs prompts without blocks", response_class=Response, **openapi.FRAMES)
    async def generate(request: Request) -> Any:
        key = access.key(request, Permission.BLOCKS)
        return await _frames(request, key, "generate", traces.generate)

    @made.get("/edits", summary="The edits beside this key's requests", **openapi.EDITS)
    async def seen(request: Request) -> Response:
        return JSONResponse({"edits": edits.seen(access.key(request))})

    @made.post("/edits", summary="Installs a form, as JSON, or a block, as a frame", **openapi.INSTALL)
    async def install(request: Request, name: str | None = None) -> Response:
        if request.headers.get("content-type") != CONTENT_TYPE:
            key = access.key(request)
            with metrics.counted("edit"):
                return JSONResponse(await edits.install_form(key, await _body(request, traces.wire.header)))
        key = access.key(request, Permission.BLOCKS)
        with metrics.counted("edit"):
            return JSONResponse(await edits.install(key, name, await _asked(request, "edit")))

    @made.delete("/edits", summary="Clears all edits that this key may", **openapi.CLEARED)
    async def clear_all(request: Request) -> Response:
        return JSONResponse({"cleared": await edits.clear(access.key(request))})

    @made.delete("/edits/{number}", summary="Clears one", **openapi.CLEARED)
    async def clear(request: Request, number: int) -> Response:
        return JSONResponse({"cleared": await edits.clear(access.key(request), number)})

    @made.get("/form", summary="The JSON Schema of a form", **openapi.PLAIN)
    async def form_schema(request: Request) -> Response:
        access.key(request)
        return JSONResponse(schema())

    @made.post("/form", summary="Reads and edits beside a prompt, as JSON says", **openapi.FORM)
    async def form(request: Request) -> Response:
        key = access.key(request)
        with access.admitted(key), metrics.counted("form"):
            asked, parsed = forms.parsed(await _body(request, traces.wire.header))
            return JSONResponse(await forms.answered(model, asked, parsed, key))

    return made


def described(model: AsyncVLLM) -> dict[str, Any]:
    """The model as a client knows it: JSON."""
    engine = model._running()
    config = engine.config.model_config
    return {
        "insitu": __version__,
        "model": config.model if config.served_model_name is None else config.served_model_name,
        "layers": engine.layers,
        "architecture": config.architectures[0],
        "width": config.get_hidden_size(),
        "vocabulary": config.get_vocab_size(),
        "dtype": str(config.dtype).removeprefix("torch."),
        "modules": {path: [one.kind, list(one.children), one.note] for path, one in engine.outline.modules.items()},
    }


def tokenizer_of(model: AsyncVLLM) -> Response:
    tokenizer = model.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RefusedError(501, "no-tokenizer", "this model's tokenizer has no tokenizer.json")
    special: Mapping[str, Any] = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if token}
    return JSONResponse(
        {"tokenizer": backend.to_str(), "special": special, "chat_template": getattr(tokenizer, "chat_template", None)}
    )


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise RefusedError(413, "too-large", f"the request has more than {limit} bytes")
    return bytes(body)
