"""Linear probes: a direction that tells two kinds of rows apart, and what it says of each token while the model writes.

Alain and Bengio, "Understanding intermediate layers using linear classifier probes", 2016.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.engine.client.view import view_of
from insitu.recipes.prompts import listed, waiting


@dataclass(frozen=True)
class Probe:
    """``score(rows)`` is the log-odds of the second class for each row ``[rows, width]`` at the place ``at``."""

    at: str
    weight: torch.Tensor
    bias: float

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float() @ self.weight.to(rows.device) + self.bias

    def accuracy(self, rows: torch.Tensor, labels: Sequence[int]) -> float:
        """The share of rows that fall on the side of their label (0 or 1)."""
        return ((self.score(rows) > 0).int().cpu() == torch.tensor(list(labels))).float().mean().item()


@dataclass(frozen=True)
class TokenScores:
    """A score for each token of a prompt and of what was generated after it (but the last, which no step reads)."""

    tokens: list[str]
    scores: list[float]
    prompt_tokens: int

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """The text with each token coloured by its score."""
        from insitu.plots import token_strip_png

        token_strip_png(path, self.tokens, self.scores, split=self.prompt_tokens)


def rows_at(model: VLLM, prompts: Sequence[Any], at: str, *, position: int = -1) -> torch.Tensor:
    """One row of each prompt at a place: ``[prompts, width]``, in float32."""
    place = view_of(waiting(model)).one(at)

    def read(tracer: Any) -> torch.Tensor:
        return place.read(model)[position].float().clone()

    return torch.stack(list(model.run(read, listed(prompts), max_tokens=1)))


def fit_probe(rows: torch.Tensor, labels: Sequence[int], at: str, **settings: Any) -> Probe:
    """Logistic regression on rows ``[n, width]`` with labels 0 and 1; ``settings`` are scikit-learn's
    ``LogisticRegression``'s (``C=0.1``). Rows may come from ``rows_at`` or from a capture.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler
    except ModuleNotFoundError as error:
        raise ArgumentError("fitting probes needs scikit-learn: pip install 'insitu[recipes]'") from error
    if set(labels) != {0, 1}:
        raise ArgumentError(f"labels are 0 and 1, and both occur; got {sorted(set(labels))}")
    scaler = StandardScaler().fit(rows.float().numpy())
    scaled = scaler.transform(rows.float().numpy())
    fitted = LogisticRegression(**{"max_iter": 1000, **settings}).fit(scaled, list(labels))
    weight = fitted.coef_[0] / scaler.scale_
    bias = float(fitted.intercept_[0] - (weight * scaler.mean_).sum())
    return Probe(at, torch.tensor(weight, dtype=torch.float32), bias)


def probe_scores(model: VLLM, prompt: Any, probe: Probe, **sampling: Any) -> TokenScores:
    """The probe at every token, prompt and generated ones, while the model writes; ``sampling`` as for ``trace``."""
    place = view_of(waiting(model)).one(probe.at)

    def watch(tracer: Any) -> tuple[list[float], list[int], int]:
        scores: list[float] = []
        for _ in tracer.iter[:]:
            scores += probe.score(place.read(model)).tolist()
        result = tracer.result
        ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        return scores, ids, len(result.prompt_token_ids)

    scores, ids, count = model.run(watch, prompt, **sampling)
    return TokenScores([model.tokenizer.decode([token]) for token in ids[: len(scores)]], scores, count)
