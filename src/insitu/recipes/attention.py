"""Attention patterns: how much each token takes of each token before it, by head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from insitu.engine.client.model import VLLM
from insitu.recipes.prompts import waiting


@dataclass(frozen=True)
class AttentionPatterns:
    """``patterns[layer]`` is ``[heads, queries, keys]`` in float32."""

    tokens: list[str]
    patterns: dict[int, torch.Tensor]

    def save_png(self, path: str | os.PathLike[str], layer: int, heads: Sequence[int] | None = None) -> None:
        """The heads of one layer side by side, queries down and keys across."""
        from insitu.plots import attention_png

        pattern = self.patterns[layer]
        chosen = range(len(pattern)) if heads is None else heads
        attention_png(path, self.tokens, [pattern[head].tolist() for head in chosen], [f"{layer}.{h}" for h in chosen])

    def induction(self) -> dict[tuple[int, int], float]:
        """By layer and head, how much a token takes of the one after its own last occurrence: induction heads
        (Olsson et al., "In-context learning and induction heads", 2022) have much of it. Empty without repeats."""
        after = [(query, key + 1) for query, key in _repeats(self.tokens) if key + 1 < query]
        if not after:
            return {}
        queries, keys = zip(*after, strict=True)
        return {
            (layer, head): pattern[head][list(queries), list(keys)].mean().item()
            for layer, pattern in self.patterns.items()
            for head in range(len(pattern))
        }


def attention_patterns(model: VLLM, prompt: Any, *, layers: Sequence[int] | None = None) -> AttentionPatterns:
    """The patterns of the layers (all if left out) for one prompt, computed as the engine's kernel does."""
    chosen = sorted(range(len(model.attn_pattern)) if layers is None else layers)

    def read(tracer: Any) -> tuple[list[str], list[torch.Tensor]]:
        return tracer.tokens, [model.attn_pattern[layer] for layer in chosen]

    tokens, patterns = waiting(model).run(read, prompt, max_tokens=1)
    return AttentionPatterns(tokens, dict(zip(chosen, patterns, strict=True)))


def _repeats(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Each position with the last one before it that has the same token."""
    last: dict[str, int] = {}
    found = []
    for position, token in enumerate(tokens):
        if token in last:
            found.append((position, last[token]))
        last[token] = position
    return found
