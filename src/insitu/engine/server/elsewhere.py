"""vLLM's other routes, which have no place for a form, nor for what edits leave."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import JSONResponse

from insitu.engine.server.beside import FIELD, Beside, asked_beside

_SIGNS = (f'"{FIELD}"'.encode(), b"\\u", b"\0")
"""What a body has in it that has the field: its name, or an escape, or a text that is not UTF-8."""
_WITH_A_PLACE = ("/v1/completions", "/v1/chat/completions")


class Elsewhere:
    """An ASGI middleware: refuses a form where it would be dropped without a word, and has errors of edits told."""

    def __init__(self, app: Any, own: str, before_metrics: Callable[[], Awaitable[None]]) -> None:
        """``own``: what insitu's own routes begin with. ``before_metrics`` is awaited when metrics are asked for."""
        self._app = app
        self._own = own
        self._before_metrics = before_metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/metrics":
            await self._before_metrics()
        if scope["method"] != "POST" or path in _WITH_A_PLACE or path.startswith(self._own):
            return await self._app(scope, receive, send)
        if any(name == b"content-type" and b"json" in value.lower() for name, value in scope["headers"]):
            messages = await _all(receive)
            if _has_field(b"".join(message.get("body", b"") for message in messages)):
                return await _refusal(path)(scope, receive, send)
            receive = _again(messages, receive)
        token = asked_beside.set(Beside(told=False))
        try:
            return await self._app(scope, receive, send)
        finally:
            asked_beside.reset(token)


async def _all(receive: Any) -> list[Any]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _again(messages: list[Any], receive: Any) -> Any:
    async def replayed() -> Any:
        return messages.pop(0) if messages else await receive()

    return replayed


def _has_field(body: bytes) -> bool:
    if not any(sign in body for sign in _SIGNS):
        return False
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM says so
    return isinstance(data, dict) and data.get(FIELD) is not None


def _refusal(path: str) -> JSONResponse:
    said = f"{path} can't do a form: {' and '.join(_WITH_A_PLACE)} can, and POST /insitu/v1/form"
    return JSONResponse({"error": {"message": said, "type": "not-supported", "param": FIELD, "code": 400}}, 400)
