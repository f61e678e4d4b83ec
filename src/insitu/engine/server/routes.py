"""The routes: what is asked over HTTP, who may ask it, and the answers as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from insitu._version import __version__
from insitu.block import ArgumentError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.server.traces import Traces
from insitu.net import (
    CONTENT_TYPE,
    Event,
    Failed,
    Keys,
    TraceRequest,
    WireError,
    decode_frame,
    encode_event,
    encode_frame,
)

PREFIX = "/insitu/v1"


class RefusedError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> JSONResponse:
        return JSONResponse({"error": {"code": self.code, "message": str(self)}}, self.status)


def router(model: AsyncVLLM, traces: Traces, keys: Keys) -> APIRouter:
    """insitu's routes. Without keys, everybody who reaches the server may use them."""
    made = APIRouter(prefix=PREFIX, tags=["insitu"])

    @made.get("/model", summary="The module tree")
    async def tree(request: Request) -> Response:
        if (refused := _refusal(request, keys)) is not None:
            return refused
        return JSONResponse(described(model))

    @made.get("/tokenizer", summary="The tokenizer, as a tokenizer.json")
    async def tokenizer(request: Request) -> Response:
        if (refused := _refusal(request, keys)) is not None:
            return refused
        return tokenizer_of(model)

    @made.get("/stats", summary="Steps by path, and traces in flight")
    async def stats(request: Request) -> Response:
        if (refused := _refusal(request, keys)) is not None:
            return refused
        return JSONResponse({**dataclasses.asdict(await model.stats()), "in_flight": await model.in_flight()})

    @made.post("/trace", summary="Runs blocks beside prompts", response_class=StreamingResponse)
    async def trace(request: Request) -> Response:
        if (refused := _refusal(request, keys)) is not None:
            return refused
        try:
            body = await _body(request, traces.wire.header + traces.wire.tensors)
            asked = TraceRequest.of_frame(decode_frame(body, traces.wire), traces.wire)
        except RefusedError as error:
            return error.response()
        except WireError as error:
            return RefusedError(400, error.code, str(error)).response()
        return StreamingResponse(_encoded(traces.run(asked)), media_type=CONTENT_TYPE)

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
        return RefusedError(501, "no-tokenizer", "this model's tokenizer has no tokenizer.json").response()
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


async def _encoded(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            try:
                frame = encode_event(event)
            except ArgumentError as error:
                frame = encode_event(Failed(error, getattr(event, "invoke", None)))
            yield encode_frame(frame)
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def _refusal(request: Request, keys: Keys) -> Response | None:
    if not len(keys):
        return None
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or keys.find(given) is None:
        return RefusedError(401, "no-key", "this server asks for a key: Authorization: Bearer KEY").response()
    return None
