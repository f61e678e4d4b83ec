"""Places: the points of a forward pass at which a block can wait."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One point of a step: a call's entry or exit, the logits, the sampled ids, the result.

    ``site`` is ``"input"`` or ``"output"`` for a module, and for the places that belong to the
    whole model (``path`` is then empty) one of ``"step"`` (its beginning), ``"logits"``,
    ``"samples"``, ``"result"``. ``op`` names an operation in the module's forward; one in the
    function that an operation calls follows it after a dot.
    """

    path: str
    site: str
    op: str = ""

    def __str__(self) -> str:
        return "tracer.result" if self == RESULT else f"{self.call}.{self.site}"

    @property
    def call(self) -> str:
        """The module or operation, as a block names it."""
        return ".".join((self.path or "model", *(f"source.{name}" for name in self.op.split(".") if name)))

    @property
    def in_forward(self) -> bool:
        """True for places that a call in the forward serves."""
        return self.site in ("input", "output")

    def at(self, site: str) -> Place:
        """The other places of the same call."""
        return self._replace(site=site)

    @property
    def module(self) -> Place:
        """The same site of the module whose forward it is in."""
        return self._replace(op="") if self.op else self

    def is_inside(self, other: Place) -> bool:
        """Whether its call is made within the other's, as far as the names tell."""
        if other.op:
            return self.path == other.path and self.op.startswith(other.op + ".")
        if self.path == other.path:
            return self.op != ""
        return self.path.startswith(other.path + ".") or not other.path


STEP = Place("", "step")
LOGITS = Place("", "logits")
SAMPLES = Place("", "samples")
RESULT = Place("", "result")
