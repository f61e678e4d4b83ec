"""The logit lens: what the model would say if it stopped after each layer.

nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from insitu.block import save
from insitu.engine.client.model import VLLM
from insitu.recipes.prompts import waiting


@dataclass(frozen=True)
class LogitLens:
    """``top[layer][position]``: the most probable tokens there with their probabilities, best first."""

    tokens: list[str]
    top: list[list[list[tuple[str, float]]]]

    @property
    def layers(self) -> range:
        return range(len(self.top))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """A picture: layers by positions, the top token in each cell, coloured by its probability."""
        from insitu.plots import logit_lens_png

        best = [[cell[0] for cell in row] for row in self.top]
        cells = [[token for token, _ in row] for row in best]
        probs = [[probability for _, probability in row] for row in best]
        logit_lens_png(path, self.tokens, self.layers, cells, probs)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """A self-contained page: the same grid, with the runners-up on hover."""
        from insitu.plots import logit_lens_html

        logit_lens_html(path, self.tokens, self.layers, self.top)


def logit_lens(model: VLLM, prompt: Any, *, top: int = 5) -> LogitLens:
    """The ``top`` tokens that each layer's residual stream unembeds to, at each position of ``prompt``.

    The stream goes through the model's own last norm and unembedding.
    """
    with waiting(model).trace(prompt, temperature=0.0, max_tokens=1) as tracer:
        found: list[Any] = save([])
        for stream in model.resid_post:
            logits = model.unembed(model.apply_final_norm(stream)).float()
            found.append(logits.softmax(-1).topk(top))
        result = tracer.result.save()
    decode = model.tokenizer.decode
    ranks = [
        [
            [(decode([token]), probability) for token, probability in zip(ids, probs, strict=True)]
            for ids, probs in zip(layer.indices.tolist(), layer.values.tolist(), strict=True)
        ]
        for layer in found
    ]
    return LogitLens([decode([token]) for token in result.prompt_token_ids], ranks)
