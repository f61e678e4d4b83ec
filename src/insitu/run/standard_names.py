"""All standard names of one model: where each is computed, or why it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from insitu.block import LocationError
from insitu.run.heads import HEADS
from insitu.run.interleaver import Interleaver
from insitu.run.stream import Stream
from insitu.tree import LOGITS, Named, Place

OF_MODEL = ("embed", "pos_embed", "final_norm")
OF_LAYER = ("resid_pre", *HEADS, "attn_out", "resid_mid", "router_logits", "mlp_out", "resid_post")

Name = tuple[str, int | None]


@dataclass(frozen=True)
class Names:
    """``computed`` is in the order of the forward, as far as one has been watched. ``parameters``: how many
    the model has in this process."""

    computed: dict[Name, Stream] = field(default_factory=dict)
    absent: dict[Name, str] = field(default_factory=dict)
    parameters: int = 0


def names_of(interleaver: Interleaver) -> Names:
    anatomy = interleaver.anatomy
    wanted: list[Name] = [(name, None) for name in OF_MODEL]
    wanted += [(name, layer) for layer in range(anatomy.layers) for name in OF_LAYER]
    computed: dict[Name, Stream] = {}
    absent: dict[Name, str] = {}
    for name, layer in wanted:
        try:
            computed[name, layer] = anatomy.stream(name, layer)
        except LocationError as error:
            absent[name, layer] = str(error)
    ordered = dict(sorted(computed.items(), key=lambda item: interleaver.position(item[1].place)))
    return Names(ordered, absent, interleaver.modules.parameters)


def visits(interleaver: Interleaver, places: Iterable[Named]) -> list[int]:
    """When each place comes in a step, as far as one has been watched; logits, which are after it, last."""
    return [_visit(interleaver, one) for one in places]


def _visit(interleaver: Interleaver, one: Named) -> int:
    if not one.stream:
        return interleaver.position(one.place)
    if Place("", one.stream) == LOGITS:
        return sys.maxsize
    return interleaver.position(interleaver.anatomy.stream(one.stream, one.layer).place)
