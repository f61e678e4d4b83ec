"""What fails in a stream of vLLM's other routes, told as their APIs tell it.

vLLM breaks one of ``/v1/responses`` off without a word and leaves what runs in the background ``queued``; in those that
it converts from a chat's (messages, Cohere's) it tells of its own trouble with the chat's error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from openai.types.responses import ResponseFailedEvent
from vllm.entrypoints.generate.base.serving import GenerationError  # pyright: ignore[reportPrivateImportUsage]
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

_ERROR = 'data: {"error"'
_ENDS = ("response.completed", "response.failed")
_CONVERTERS = {
    "anthropic_serving_messages": "message_stream_converter",
    "cohere_serving_chat_v2": "_chat_completion_stream_to_v2",
}
"""Of vLLM's handlers, what converts a chat's stream; 0.26 has none of Cohere's."""


class FailedEvent(ResponseFailedEvent):
    """The last of a stream that failed."""

    response: ResponsesResponse  # type: ignore[assignment]


def watch_streams(state: Any) -> None:
    """``state``: that of vLLM's app, with its handlers."""
    for name, converter in _CONVERTERS.items():
        if (handler := getattr(state, name, None)) is not None:
            setattr(handler, converter, partial(_converted, getattr(handler, converter)))
    if (handler := state.openai_serving_responses) is not None:
        for name, through in (
            ("responses_stream_generator", _stream),
            ("_run_background_request", _background),
            ("responses_background_stream_generator", _followed),
        ):
            setattr(handler, name, partial(through, handler, getattr(handler, name)))
        handler._convert_generation_error_to_streaming_response = _raised


def _converted(convert: Any, chunks: Any, *args: Any, **more: Any) -> Any:
    return convert(_raising(chunks), *args, **more)


async def _raising(chunks: Any) -> AsyncGenerator[Any, None]:
    """The chunks of a chat; its error is raised, and told by whoever converts them."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if isinstance(chunk, str) and chunk.startswith(_ERROR):  # since 0.33 objects, whose errors vLLM tells
                raise GenerationError(json.loads(chunk.removeprefix("data: "))["error"]["message"])
            yield chunk


async def _stream(handler: Any, events: Any, request: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
    response: Any = None
    number = 0
    try:
        async with aclosing(events(request, *args, **more)) as streamed:
            async for event in streamed:
                response = response or event.response
                number += 1
                yield event
    except Exception as error:
        if response is None:
            raise
        await _store(handler, request, error)
        failed = _as_failed(response.model_copy(), error)
        yield FailedEvent(type="response.failed", sequence_number=number, response=failed)


async def _background(handler: Any, run: Any, request: Any, *args: Any, **more: Any) -> None:
    try:
        await run(request, *args, **more)
    except Exception as error:
        await _store(handler, request, error)


async def _followed(_: Any, events: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
    """vLLM waits for the event of an answer that is complete."""
    async with aclosing(events(*args, **more)) as followed:
        async for event in followed:
            yield event
            if event.type in _ENDS:
                return


def _raised(error: GenerationError) -> str:
    """vLLM would make a chat's error of it, of which it can't make an event."""
    raise error


async def _store(handler: Any, request: Any, error: BaseException) -> None:
    async with handler.response_store_lock:
        stored = handler.response_store.get(request.request_id)
        if stored is not None and stored.status not in ("completed", "cancelled"):
            _as_failed(stored, error)


def _as_failed(response: Any, error: BaseException) -> Any:
    response.status = "failed"
    response.error = {"code": "server_error", "message": str(error)}
    return response
