"""What recipes ask of a model and of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from insitu.block import ArgumentError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.model import VLLM
from insitu.engine.client.prompts import are_several


def waiting(model: VLLM) -> VLLM:
    """The model, if its runs are waited for. Raises ``ArgumentError`` for an async one."""
    if isinstance(model, AsyncVLLM):
        raise ArgumentError(
            "recipes wait for what they run, and the runs of this model are awaited: load it without mode='async'"
        )
    return model


def listed(prompts: Any) -> list[Any]:
    """The prompts as a list; of one prompt by itself, a list of that. Raises ``ArgumentError`` if there are none."""
    is_one = isinstance(prompts, (list, tuple)) and bool(prompts) and not are_several(prompts)
    found = [prompts] if is_one or isinstance(prompts, (str, Mapping)) else list(prompts)
    if not found:
        raise ArgumentError("there are no prompts")
    return found
