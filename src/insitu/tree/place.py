"""Places: the points of a forward pass at which a block can wait."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One point of a step: a module's entry or exit, the logits, the sampled ids, the result.

    ``site`` is ``"input"`` or ``"output"`` for a module, and for the places that belong to the
    whole model (``path`` is then empty) one of ``"step"`` (its beginning), ``"logits"``,
    ``"samples"``, ``"result"``.
    """

    path: str
    site: str

    def __str__(self) -> str:
        if not self.path:
            return "tracer.result" if self.site == "result" else f"model.{self.site}"
        return f"{self.path}.{self.site}"

    @property
    def in_forward(self) -> bool:
        """True for places that a module's call serves."""
        return self.site in ("input", "output")


STEP = Place("", "step")
LOGITS = Place("", "logits")
SAMPLES = Place("", "samples")
RESULT = Place("", "result")
