"""Queries, keys, values and weights of transformers' attention, and what follows when one of the three is edited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.architectures.reference import oracle

Edit = tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]
_QKV = ("q", "k", "v")


@dataclass
class HeadsOf:
    """By layer: ``q``, ``k``, ``v`` as ``[tokens, heads, size]``, where transformers hands them to a function of
    their own, and ``attn_pattern``. ``logits`` of every position."""

    layers: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __getitem__(self, key: tuple[str, int]) -> torch.Tensor:
        return self.layers[key[0]][key[1]]

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key[1] in self.layers.get(key[0], {})

    def set(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.layers.setdefault(name, {})[layer] = value


def by_hand(name: str) -> bool:
    """Whether transformers computes attention inline, where no function is given queries and keys."""
    return name in ("mpt", "bloom")


@torch.no_grad()
def heads(name: str, ids: Sequence[int], edit: Edit | None = None) -> HeadsOf:
    """One forward of transformers over ``ids``, ``edit`` made in it: (``q``, ``k`` or ``v``, layer, function of it)."""
    model, found = oracle(name), HeadsOf()
    tokens = torch.tensor([list(ids)])
    if by_hand(name):
        output = model(tokens, output_attentions=True)
        for layer, weights in enumerate(output.attentions):
            found.set("attn_pattern", layer, weights[0])
    else:
        watched = _sdpa if name.startswith("falcon") else _eager
        with watched(model, found, edit):
            output = model(tokens)
    found.logits = output.logits[0]
    return found


def _taken(
    model: Any, found: HeadsOf, layer: int, given: Sequence[torch.Tensor], edit: Edit | None
) -> list[torch.Tensor]:
    """What attention goes on with."""
    given = list(given)
    for number, name in enumerate(_QKV):
        value = given[number][0].transpose(0, 1).contiguous()
        # OPT scales its queries before, and Falcon repeats keys and values for each of their queries.
        scale = value.shape[-1] ** 0.5 if model.config.model_type == "opt" and name == "q" else 1.0
        repeated = value.shape[1] // getattr(model.config, "num_kv_heads", value.shape[1]) if name != "q" else 1
        repeated = repeated if getattr(model.config, "new_decoder_architecture", False) else 1
        value = value[:, ::repeated] * scale
        if edit is not None and edit[:2] == (name, layer):
            value = edit[2](value)
            given[number] = (value / scale).repeat_interleave(repeated, 1).transpose(0, 1)[None]
        found.set(name, layer, value.clone())
    return given


@contextmanager
def _eager(model: nn.Module, found: HeadsOf, edit: Edit | None) -> Iterator[None]:
    modeling: Any = sys.modules[type(model).__module__]
    attend = modeling.eager_attention_forward

    def watched(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        layer = module.layer_idx
        output, weights = attend(module, *_taken(model, found, layer, (query, key, value), edit), *args, **kwargs)
        found.set("attn_pattern", layer, weights[0])
        return output, weights

    modeling.eager_attention_forward = watched
    try:
        yield
    finally:
        modeling.eager_attention_forward = attend


@contextmanager
def _sdpa(model: nn.Module, found: HeadsOf, edit: Edit | None) -> Iterator[None]:
    """Falcon hands all to torch's fused function, which returns no weights: those are of what it is given."""
    attend = nn.functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        layer = len(found.layers.get("q", {}))
        query, key, value = _taken(model, found, layer, (query, key, value), edit)
        grouped = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query[0] @ grouped[0].transpose(1, 2) * (kwargs.get("scale") or query.shape[-1] ** -0.5)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask[0], float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask[0]
        elif kwargs.get("is_causal"):
            scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        found.set("attn_pattern", layer, scores.softmax(-1))
        return attend(query, key, value, attn_mask=attn_mask, **kwargs)

    nn.functional.scaled_dot_product_attention = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
