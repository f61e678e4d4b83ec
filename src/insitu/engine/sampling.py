"""Keyword arguments of a trace, as vLLM's sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams

from insitu.block import ArgumentError
from insitu.engine.names import require_known

# Fields that vLLM fills in by itself, or that insitu sets.
_INTERNAL = {"output_kind", "skip_clone"}
_KNOWN = {
    name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_") and name not in _INTERNAL
}
_OURS = {"max_new_tokens", "lora_request"}


def check_sampling(settings: Mapping[str, Any]) -> None:
    """Raises ``ArgumentError`` for a setting that vLLM does not have."""
    require_known(settings, _KNOWN | _OURS, "a sampling setting of vLLM's SamplingParams")
    if "max_tokens" in settings and "max_new_tokens" in settings:
        raise ArgumentError("max_tokens and max_new_tokens are the same setting; give one of them")


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """The parameters of one request. vLLM's own errors on values pass through."""
    fields = {name: value for name, value in settings.items() if name not in _OURS}
    if "max_new_tokens" in settings:
        fields["max_tokens"] = settings["max_new_tokens"]
    return SamplingParams(**fields)


def certain_length(params: SamplingParams) -> int | None:
    """How many tokens a request will have, if nothing but ``max_tokens`` can end it."""
    if params.max_tokens is None or params.min_tokens == params.max_tokens:
        return params.max_tokens
    return params.max_tokens if params.ignore_eos and not params.stop and not params.stop_token_ids else None
