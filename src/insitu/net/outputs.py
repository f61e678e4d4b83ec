"""A finished request as plain data, with the names that vLLM gives it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["PLAIN", "CompletionOutput", "Logprob", "RequestOutput", "plain_of"]


@dataclass
class Logprob:
    """The log probability of one token, its rank in the vocabulary from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    saves: Any = None


@dataclass
class RequestOutput:
    """What vLLM's class of that name says, of one request."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int | None = None
    invoke: int | None = None
    saves: Any = None
    error: Any = None


PLAIN: dict[str, type] = {"request": RequestOutput, "completion": CompletionOutput, "logprob": Logprob}
_OF_VLLM = {
    "vllm.outputs.RequestOutput": "request",
    "vllm.outputs.CompletionOutput": "completion",
    "vllm.logprobs.Logprob": "logprob",
}


def plain_of(value: object) -> tuple[str, dict[str, Any]] | None:
    """Kind and fields of an output, vLLM's or one of these; None for all else. Ids of requests stay behind."""
    kind = next((each for each, plain in PLAIN.items() if isinstance(value, plain)), None)
    if kind is None:
        names = (f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__)
        kind = next((_OF_VLLM[name] for name in names if name in _OF_VLLM), None)
    if kind is None:
        return None
    found = {each.name: getattr(value, each.name, None) for each in fields(PLAIN[kind])}
    if kind == "completion":
        found["token_ids"] = list(found["token_ids"] or ())
    return kind, found
