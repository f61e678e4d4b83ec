"""Steering: a direction from two sets of prompts, added to the stream or taken out of it while the model writes.

Difference of means: Marks and Tegmark, "The geometry of truth", 2023; adding it, Turner et al., "Activation addition",
2023, and Rimsky et al., "Steering Llama 2 via contrastive activation addition", 2023; projecting it out, Arditi et al.,
"Refusal in language models is mediated by a single direction", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.engine.client.view import view_of
from insitu.recipes.prompts import listed, waiting

How = Literal["add", "project_out", "set"]
Phase = Literal["all", "prompt", "generated"]


def difference_of_means(
    model: VLLM, positive: Sequence[Any], negative: Sequence[Any], *, at: str, position: int | slice = -1
) -> torch.Tensor:
    """The mean row ``[width]`` at ``at`` (``resid_post[15]``) over one set of prompts less that over the other, in
    float32.

    ``position``: which row of each prompt, or a slice of them.
    """
    place = view_of(waiting(model)).one(at)
    rows = slice(position, position + 1 or None) if isinstance(position, int) else position

    def read(tracer: Any) -> torch.Tensor:
        return place.read(model)[rows].float().mean(0)

    means = [torch.stack(list(model.run(read, listed(some), max_tokens=1))).mean(0) for some in (positive, negative)]
    return means[0] - means[1]


@dataclass(frozen=True)
class Steering:
    """A vector ``[width]`` put to use at one place, in the steps of ``phase``: the prompt, generated tokens, or all.

    ``"add"``: ``scale`` times the vector, with ``norm_matched`` times the row's own norm and the vector's direction.
    ``"project_out"``: ``scale`` times the row's part along the vector is taken away. ``"set"``: the row becomes the
    vector. ``positions``: which rows of the prompt.
    """

    model: VLLM
    vector: torch.Tensor
    at: str
    how: How = "add"
    scale: float = 1.0
    norm_matched: bool = False
    phase: Phase = "all"
    positions: slice = field(default_factory=lambda: slice(None))

    def __post_init__(self) -> None:
        if self.how not in ("add", "project_out", "set") or self.phase not in ("all", "prompt", "generated"):
            raise ArgumentError(
                f"how={self.how!r}, phase={self.phase!r}: how is 'add', 'project_out' or 'set', and phase is 'all', "
                f"'prompt' or 'generated'"
            )

    def __call__(self, tracer: Any) -> None:
        """The block: as ``model.run(steering, prompt)``, or called in a block of your own."""
        place = view_of(self.model).one(self.at)
        if self.phase == "prompt":
            self.edit(place.read(self.model)[self.positions])
            return
        for step in tracer.iter[:] if self.phase == "all" else tracer.iter[1:]:
            rows = place.read(self.model)
            self.edit(rows[self.positions] if step == 0 else rows)

    def edit(self, rows: torch.Tensor) -> None:
        """Edits rows ``[any, width]`` in place."""
        vector = self.vector.to(rows.device, rows.dtype)
        if self.how == "set":
            rows[:] = vector
        elif self.how == "project_out":
            unit = vector / vector.norm()
            rows -= self.scale * (rows @ unit).unsqueeze(-1) * unit
        elif self.norm_matched:
            rows += self.scale * rows.norm(dim=-1, keepdim=True) * vector / vector.norm()
        else:
            rows += self.scale * vector

    def generate(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        """What the model writes after each prompt."""

        def steered(tracer: Any) -> str:
            self(tracer)
            return tracer.result.outputs[0].text

        return waiting(self.model).run(steered, listed(prompts), **sampling)
