"""Keyword arguments of a trace, as vLLM's sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from insitu.block import ArgumentError
from insitu.engine.names import require_known
from insitu.engine.tag import ASKED

# Fields that vLLM fills in by itself, or that insitu sets.
_INTERNAL = {"output_kind", "skip_clone"}
_KNOWN = {
    name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_") and name not in _INTERNAL
}
_OURS = {"max_new_tokens", "lora_request", "edits"}
_WANTED = {
    **get_type_hints(SamplingParams),
    "max_new_tokens": int | None,
    "lora_request": LoRARequest | None,
    "edits": list[str] | None,
}
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    list[int]: "a list of integers",
    list[str]: "a list of texts",
    dict[int, float]: "a dict of numbers by token id",
    dict[str, Any]: "a dict by name",
}
_LARGEST = 2**63 - 1
_LATER = {
    "serve": "it is for a whole trace of a sync model, `model.trace(prompt, serve=url)`",
    "keep_on": "it is for a whole trace or run of a sync model whose engine is in this process",
    "progress": "it is for a whole trace or run of a sync model; bars are shown by no other",
}


def check_sampling(settings: Mapping[str, Any], vocabulary: int) -> None:
    """Raises ``ArgumentError`` for a setting that vLLM does not have, or whose value is of another type than its, and
    for stop tokens that are not among so many: with ``min_tokens``, such a one ends vLLM's engine."""
    for name in settings:
        if name in _LATER:
            raise ArgumentError(f"`{name}`: {_LATER[name]}")
    require_known(settings, _KNOWN | _OURS, "a sampling setting of vLLM's SamplingParams")
    if "max_tokens" in settings and "max_new_tokens" in settings:
        raise ArgumentError("max_tokens and max_new_tokens are the same setting; give one of them")
    for name, value in settings.items():
        plain = _typed(name, value)
        for token in plain or () if name == "stop_token_ids" else ():
            if not 0 <= token < vocabulary:
                raise ArgumentError(f"stop_token_ids: {token} is not in the vocabulary of {vocabulary}")


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """The parameters of one request. vLLM's own errors on values pass through."""
    fields = {name: _typed(name, value) for name, value in settings.items() if name not in _OURS}
    if "max_new_tokens" in settings:
        fields["max_tokens"] = _typed("max_new_tokens", settings["max_new_tokens"])
    if settings.get("edits") is not None:
        fields["extra_args"] = {**(fields.get("extra_args") or {}), ASKED: list(settings["edits"])}
    try:
        return SamplingParams(**fields)
    except Exception as error:
        raise error.with_traceback(None) from None


class Templates:
    """Parameters of settings that were checked before, where all of these are numbers and the like."""

    def __init__(self) -> None:
        self._known: dict[Any, SamplingParams] = {}

    def of(self, settings: Mapping[str, Any]) -> SamplingParams | None:
        return self._known.get(_sign(settings))

    def made(self, settings: Mapping[str, Any]) -> SamplingParams:
        """``sampling_params(settings)``, which are checked."""
        sign, made = _sign(settings), sampling_params(settings)
        if sign is not None:
            if len(self._known) >= 64:
                self._known.clear()
            self._known[sign] = made
        return made


def _sign(settings: Mapping[str, Any]) -> Any:
    types = tuple(map(type, settings.values()))
    return (tuple(settings.items()), types) if _SCALARS.issuperset(types) else None


_SCALARS = frozenset((int, float, bool, str, type(None)))


def certain_length(params: SamplingParams) -> int | None:
    """How many tokens a request will have, if nothing but ``max_tokens`` can end it."""
    if params.max_tokens is None or params.min_tokens == params.max_tokens:
        return params.max_tokens
    return params.max_tokens if params.ignore_eos and not params.stop and not params.stop_token_ids else None


def _typed(name: str, value: Any) -> Any:
    """The value as the type that vLLM declares; numbers of numpy and torch as Python's. vLLM itself lets many
    wrong ones through, which then fail inside a step and take the engine down."""
    if name in ("logprobs", "prompt_logprobs") and isinstance(value, bool):
        return value  # vLLM takes these two
    wanted = _WANTED[name]
    kind = type(value)
    if kind in _AS_IT_IS[name] and (kind is not int or abs(value) <= _LARGEST):
        return value
    try:
        plain = value.tolist() if hasattr(value, "tolist") else value
        if _classes(wanted):
            if plain is None or isinstance(plain, _classes(wanted)):
                return plain
        elif not isinstance(plain, int) or abs(plain) <= _LARGEST:  # a larger seed ends the engine
            return msgspec.convert(plain, wanted)
    except msgspec.ValidationError:
        pass
    raise ArgumentError(f"`{name}` takes {_words(wanted)}; got {type(value).__name__} {value!r:.60}") from None


def _classes(wanted: Any) -> tuple[type, ...]:
    """Those of the types wanted that are vLLM's own."""
    return tuple(kind for kind in _kinds(wanted) if kind.__module__.startswith("vllm."))


def _kinds(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


_AS_IT_IS = {name: {int, float, bool, str, type(None)} & {*_kinds(wanted)} for name, wanted in _WANTED.items()}
"""Types that need no look at their values."""


def _words(wanted: Any) -> str:
    *most, last = (_WORDS.get(kind) or getattr(kind, "__name__", str(kind)) for kind in _kinds(wanted))
    return f"{', '.join(most)} or {last}" if most else last
