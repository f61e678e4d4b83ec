"""Runs a form: what is asked and answered in JSON, without Python."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from insitu.block import ArgumentError, FunctionBlock, InsituError
from insitu.engine.client.async_engine import AsyncEngine
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.async_trace import AsyncTrace
from insitu.engine.job import Job
from insitu.engine.server import metrics
from insitu.engine.server.access import RefusedError
from insitu.engine.server.plain import all_as_json
from insitu.guard import GuardLimits
from insitu.net import Key, WireError
from insitu.net.errors import FormError
from insitu.net.form import Form
from insitu.net.form import parsed as parsed_form
from insitu.net.form_block import FormBlock, form_block
from insitu.net.frames import decode_json


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """What of the sampling a form may set; vLLM's names."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: list[str] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request: a prompt (a text, token ids or a chat), a form, and sampling settings."""

    prompt: str | list[int | dict[str, str]]
    form: dict[str, Any]
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    edits: list[str] | None = None


def parsed(body: bytes) -> tuple[Asked, Form]:
    """Raises ``RefusedError`` with a code and, in the message, the path of what is wrong."""
    try:
        asked = msgspec.convert(decode_json(body), Asked)
        return asked, parsed_form(asked.form)
    except FormError as error:
        raise RefusedError(400, error.code, f"form: {error}") from None
    except msgspec.ValidationError as error:
        raise RefusedError(400, "invalid", str(error)) from None
    except WireError as error:
        raise RefusedError(400, error.code, str(error)) from None


def job_of(engine: AsyncEngine, block: FormBlock, call: str = "") -> Job:
    """A form's block, to be run beside one request of a ``call``, which has one form for all its prompts."""
    return Job(uuid.uuid4().hex, FunctionBlock(block), tracer=AsyncTrace(engine, [], {}), trace=call)


def beside_edits(saved: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """What edits saved and what a form has read. Raises ``ArgumentError`` for a name that both have."""
    for name in saved.keys() & read.keys():
        raise ArgumentError(
            f"an edit saves {name!r} beside this request as well: give what the form reads another name"
        )
    return {**saved, **read}


async def answered(model: AsyncVLLM, asked: Asked, form: Form, key: Key) -> dict[str, Any]:
    """What was generated and read. Raises ``RefusedError`` for what this model or this prompt can't do."""
    engine = model._running()
    limits = GuardLimits().of_key(key.limits)
    settings = msgspec.structs.asdict(asked.sampling)
    if asked.edits is not None:
        settings["edits"] = asked.edits
    try:
        block = form_block(form, model, limits.saved_bytes)
        job = job_of(engine, block)
        (result,) = await engine.run([(engine.prepare(asked.prompt, settings, key.name), job)])
        if result.error is not None and not isinstance(result.error, InsituError):  # an edit's
            raise RefusedError(500, type(result.error).__name__, f"{type(result.error).__name__}: {result.error}")
        if result.error is not None:
            raise result.error
        read = block.within(result.returned, len(result.output.outputs[0].token_ids))
        metrics.saved(read)
        saves = all_as_json(beside_edits(result.output.saves, read))
    except FormError as error:
        raise RefusedError(400, error.code, f"form: {error}") from None
    except (InsituError, ValueError, TypeError) as error:
        raise RefusedError(400, type(error).__name__, str(error)) from None
    output = result.output
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "saves": saves,
    }
