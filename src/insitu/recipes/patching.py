"""Activation patching: what of a clean run, put into a corrupted one, brings the clean answer back.

Meng et al., "Locating and editing factual associations in GPT", 2022; by heads, Wang et al., "Interpretability in the
wild", 2022; how to read it, Heimersheim and Nanda, "How to use and interpret activation patching", 2024.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.engine.client.prompts import token_ids
from insitu.engine.client.view import view_of
from insitu.recipes.metrics import Metric
from insitu.recipes.prompts import waiting
from insitu.recipes.sweep import scores
from insitu.tree import Named, Place


@dataclass(frozen=True)
class PatchSweep:
    """``effect[row][column]``: how much of the difference between the two runs one patch brings back. 0: nothing,
    as in the corrupted run; 1: all, as in the clean one. Rows are layers, columns positions or heads.

    ``noise``: the largest effect of patches that change nothing, put among the others: what is not above it says
    nothing. ``clean`` and ``corrupted`` are the metric of the two runs.
    """

    rows: list[str]
    columns: list[str]
    effect: list[list[float]]
    clean: float
    corrupted: float
    noise: float

    @property
    def best(self) -> tuple[str, str, float]:
        """The row and column with the largest effect."""
        cells = ((effect, row, column) for row, line in enumerate(self.effect) for column, effect in enumerate(line))
        effect, row, column = max(cells)
        return self.rows[row], self.columns[column], effect

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """A heat map, symmetric about 0."""
        from insitu.plots import heat_map_png

        title = f"effect of patching (noise {self.noise:.1g})"
        heat_map_png(path, self.effect, rows=self.rows, columns=self.columns, title=title, bound=1.0)


def patch_positions(
    model: VLLM,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    *,
    at: str = "resid_post",
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> PatchSweep:
    """Every layer by every position: one row of ``at`` (a standard name) of the clean prompt in the corrupted one.

    ``metric`` takes the logits ``[vocab]`` of the last token. All patches are requests of a few traces. Raises
    ``ArgumentError`` if the prompts have different numbers of tokens, or the same metric.
    """
    view = view_of(waiting(model))
    ids, other = _same_length(model, clean, corrupted)
    chosen = range(view.layers) if layers is None else layers
    where = range(len(ids)) if positions is None else positions
    places = [view.named([f"{at}[{layer}]"], "at")[0] for layer in chosen]
    patches = [Patch(place, (position,)) for place in places for position in where]
    tokens = [f"{model.tokenizer.decode([ids[position]])}" for position in where]
    return _sweep(model, (ids, other), metric, patches, [str(layer) for layer in chosen], tokens)


def patch_heads(
    model: VLLM, clean: Any, corrupted: Any, metric: Metric, *, layers: Sequence[int] | None = None
) -> PatchSweep:
    """Every layer by every head: what the head gives at all positions, before the heads are mixed."""
    view = view_of(waiting(model))
    ids, other = _same_length(model, clean, corrupted)
    chosen = range(view.layers) if layers is None else layers
    parts = [slice(head * view.head_size, (head + 1) * view.head_size) for head in range(view.heads)]
    places = [Named(place=Place(view.attention(layer), "output")) for layer in chosen]
    patches = [Patch(place, (slice(None), part)) for place in places for part in parts]
    heads = [str(head) for head in range(view.heads)]
    return _sweep(model, (ids, other), metric, patches, [str(layer) for layer in chosen], heads)


@dataclass(frozen=True)
class Patch:
    """A part of a place's rows, by an index into ``[tokens, width]``."""

    place: Named
    index: Any


def _sweep(
    model: VLLM,
    prompts: tuple[list[int], list[int]],
    metric: Metric,
    patches: Sequence[Patch],
    rows: list[str],
    columns: list[str],
) -> PatchSweep:
    clean, corrupted = prompts
    places = list(dict.fromkeys(patch.place for patch in patches))
    right, found = _run(model, clean, places, metric)
    wrong, own = _run(model, corrupted, places, metric)
    if abs(right - wrong) < 1e-6:
        raise ArgumentError(f"the metric is {right:.4g} for both prompts, so that there is nothing to bring back")
    # One patch of each place with what is there anyway, in the same batches.
    idle = [next(patch for patch in patches if patch.place == place) for place in places]
    patched = _patched(model, corrupted, patches, found, metric)
    nothing = _patched(model, corrupted, idle, own, metric)
    effects = [(score - wrong) / (right - wrong) for score in patched]
    across = len(columns)
    grid = [effects[start : start + across] for start in range(0, len(effects), across)]
    noise = max(abs((score - wrong) / (right - wrong)) for score in nothing)
    return PatchSweep(rows, columns, grid, right, wrong, noise)


def _run(
    model: VLLM, prompt: list[int], places: Sequence[Named], metric: Metric
) -> tuple[float, dict[Named, torch.Tensor]]:
    def read(tracer: Any) -> tuple[float, list[torch.Tensor]]:
        values = [place.read(model).clone() for place in places]
        return float(metric(model.logits[0])), values

    score, values = model.run(read, prompt, temperature=0.0, max_tokens=1)
    return score, dict(zip(places, values, strict=True))


def _patched(
    model: VLLM,
    prompt: list[int],
    patches: Sequence[Patch],
    values: dict[Named, torch.Tensor],
    metric: Metric,
) -> list[float]:
    def edit(patch: Patch) -> None:
        patch.place.read(model)[patch.index] = values[patch.place][patch.index]

    return scores(model, [(prompt, partial(edit, patch)) for patch in patches], metric)


def _same_length(model: VLLM, clean: Any, corrupted: Any) -> tuple[list[int], list[int]]:
    ids, other = (token_ids(prompt, lambda: model.tokenizer) for prompt in (clean, corrupted))
    if len(ids) != len(other):
        raise ArgumentError(
            f"the prompts have {len(ids)} and {len(other)} tokens, so that positions do not match: choose words of "
            f"equal numbers of tokens"
        )
    return ids, other
