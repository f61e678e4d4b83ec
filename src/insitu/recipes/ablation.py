"""Ablation: what the model answers when one part of it says nothing, or something of another prompt.

By zeros and means, see Wang et al., "Interpretability in the wild", 2022; by resampling, Chan et al., "Causal
scrubbing", 2022.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.engine.client.view import view_of
from insitu.recipes.metrics import Metric
from insitu.recipes.prompts import listed, waiting
from insitu.recipes.sweep import scores
from insitu.tree import Named

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True)
class Ablation:
    """``scores[place][prompt]``: the metric with that place ablated; ``baseline[prompt]``: without."""

    places: list[str]
    scores: list[list[float]]
    baseline: list[float]

    @property
    def drop(self) -> dict[str, float]:
        """By how much the metric falls at each place, as a mean over the prompts."""
        mean = sum(self.baseline) / len(self.baseline)
        return {place: mean - sum(row) / len(row) for place, row in zip(self.places, self.scores, strict=True)}

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """A curve of the drop over the places."""
        from insitu.plots import curves_png

        curves_png(path, {"drop of the metric": list(self.drop.values())}, labels=self.places)


def ablate(
    model: VLLM,
    prompts: Sequence[Any],
    metric: Metric,
    *,
    at: str | Sequence[str] = ("attn_out", "mlp_out"),
    how: How = "zero",
    reference: Sequence[Any] | None = None,
    seed: int = 0,
) -> Ablation:
    """Each place of ``at`` in turn (standard names and modules), for each prompt, at all of its positions.

    ``"zero"`` sets rows to 0, ``"mean"`` to the mean of the place's rows over the ``reference`` prompts (``prompts``
    if left out), ``"resample"`` each to a row of theirs, drawn at random with ``seed``. ``metric`` takes the logits
    ``[vocab]`` of the last token.
    """
    if how not in ("zero", "mean", "resample"):
        raise ArgumentError(f"how={how!r}: it is 'zero', 'mean' or 'resample'")
    prompts = listed(prompts)
    view = view_of(waiting(model))
    named = view.named([at] if isinstance(at, str) else list(at), "at")
    places = view.in_order(named, prompts[0])
    rows = _rows(model, places, listed(reference or prompts)) if how != "zero" else {}
    runs = [
        (prompt, partial(_ablate, model, place, how, rows.get(place), seed)) for place in places for prompt in prompts
    ]
    found = scores(model, [*runs, *((prompt, _nothing) for prompt in prompts)], metric)
    grid = [found[start : start + len(prompts)] for start in range(0, len(found), len(prompts))]
    return Ablation([str(place) for place in places], grid[:-1], grid[-1])


def _nothing() -> None:
    """What is done to a prompt that is run as it is."""


def _ablate(model: VLLM, place: Named, how: How, pool: torch.Tensor | None, seed: int) -> None:
    value = place.read(model)
    if pool is None:
        value[:] = 0
    elif how == "mean":
        value[:] = pool.float().mean(0).to(value.device, value.dtype)
    else:
        drawn = torch.randint(len(pool), (len(value),), generator=torch.Generator().manual_seed(seed))
        value[:] = pool[drawn].to(value.device, value.dtype)


def _rows(model: VLLM, places: Sequence[Named], prompts: list[Any]) -> dict[Named, torch.Tensor]:
    """All rows of each place, of all prompts."""

    def read(tracer: Any) -> list[torch.Tensor]:
        return [place.read(model).clone() for place in places]

    found = model.run(read, prompts, temperature=0.0, max_tokens=1)
    return {place: torch.cat([values[number] for values in found]) for number, place in enumerate(places)}
