"""What the routes take and answer, as the server's OpenAPI page has it."""

from __future__ import annotations

from typing import Any

import msgspec

from insitu.engine.server.forms import Sampling
from insitu.net import CONTENT_TYPE
from insitu.net.form import schema

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"code": _TEXT, "message": _TEXT}}},
}
_REFUSALS = {
    "400": "It can't be done as it was asked; the code says why",
    "401": "No key of this server's",
    "403": "A key that may not do this",
    "429": "As many run under this key as may",
}
# With an id of its own, so that the references in it are to its own definitions.
_FORM = {**schema(), "$id": "insitu:form"}
_SAVES = {"type": "object", "description": "Nested lists by name", "additionalProperties": True}
_EDIT = {
    "type": "object",
    "properties": {
        "number": _NUMBER,
        "name": {"type": ["string", "null"]},
        "everybody": {"type": "boolean", "description": "Whether it runs beside every request"},
        "own": {"type": "boolean", "description": "Whether this key has installed it"},
        "same_for_rows": {"type": "boolean"},
    },
}
_CLEARED = {"type": "object", "properties": {"cleared": {"type": "array", "items": _NUMBER}}}
_FRAME = {"type": "string", "format": "binary", "description": "A frame of insitu.net"}


def answers(schema: dict[str, Any] | None = None, description: str = "JSON") -> dict[int | str, dict[str, Any]]:
    """The responses of a route: JSON of a schema, or frames; and its errors."""
    kind = CONTENT_TYPE if schema is _FRAME else "application/json"
    found = {"description": description, "content": {kind: {"schema": schema or {"type": "object"}}}}
    errors = {"application/json": {"schema": _ERROR}}
    return {200: found, **{code: {"description": said, "content": errors} for code, said in _REFUSALS.items()}}


def takes(**content: dict[str, Any]) -> dict[str, Any]:
    """The body of a route: ``json=`` a schema, ``frame=`` one of frames."""
    kinds = {"json": "application/json", "frame": CONTENT_TYPE}
    return {
        "requestBody": {"required": True, "content": {kinds[name]: {"schema": each} for name, each in content.items()}}
    }


_SAMPLING = next(iter(msgspec.json.schema_components([Sampling])[1].values()))
_ASKED = {
    "type": "object",
    "required": ["prompt", "form"],
    "additionalProperties": False,
    "properties": {
        "prompt": {"description": "A text, token ids or a chat", "type": ["string", "array"]},
        "form": _FORM,
        "sampling": _SAMPLING,
        "edits": {"type": ["array", "null"], "items": _TEXT},
    },
}
_ANSWERED = {
    "type": "object",
    "properties": {
        "text": _TEXT,
        "token_ids": {"type": "array", "items": _NUMBER},
        "prompt_token_ids": {"type": "array", "items": _NUMBER},
        "finish_reason": {"type": ["string", "null"]},
        "saves": _SAVES,
    },
}
_EDITED = {"type": "object", "required": ["form"], "properties": {"form": _FORM, "name": {"type": ["string", "null"]}}}
_CHECKED = {
    "type": "object",
    "properties": {"prompts": {"type": ["array", "null"]}, "reference": {"type": "boolean", "default": True}},
}

FORM: dict[str, Any] = {"responses": answers(_ANSWERED), "openapi_extra": takes(json=_ASKED)}
FRAMES: dict[str, Any] = {
    "responses": answers(_FRAME, "One frame an event, the last `done`"),
    "openapi_extra": takes(frame=_FRAME),
}
INSTALL: dict[str, Any] = {"responses": answers(_EDIT), "openapi_extra": takes(json=_EDITED, frame=_FRAME)}
EDITS: dict[str, Any] = {
    "responses": answers({"type": "object", "properties": {"edits": {"type": "array", "items": _EDIT}}})
}
CLEARED: dict[str, Any] = {"responses": answers(_CLEARED)}
CHECK: dict[str, Any] = {"responses": answers(), "openapi_extra": takes(json=_CHECKED)}
PLAIN: dict[str, Any] = {"responses": answers()}
