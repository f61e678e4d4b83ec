"""What the tests of edits share."""

from __future__ import annotations

from typing import Any

PROMPT_IDS = [5, 90, 33, 400]
OTHER = "Water boils at"
ONE = {"temperature": 0.0, "max_tokens": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def steer(model: Any, value: Any, name: str | None = None, layer: int = 1) -> Any:
    """Adds ``value`` to the stream in every step."""
    with model.edit(name) as (tracer, edit):
        for _ in tracer.all():
            model.resid_post[layer][:] += value
    return edit


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)
