"""Places by names in a text: a module's by pattern, and standard names, of one layer, some or all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from insitu.block import ArgumentError
from insitu.tree.outline import Outline
from insitu.tree.patterns import matching
from insitu.tree.place import Place
from insitu.tree.streams import LAYER_STREAMS, MODEL_STREAMS

_STANDARD = re.compile(r"(?:model\.)?(\w+)(?:\[(-?\d*)(:?)(-?\d*)\])?")
_MODULE = re.compile(r"(.+)\.(inputs?|output)(?:\[(\d+)\])?")


class Named(NamedTuple):
    """One place: a stream, or a module's input or output, of which ``item`` if it is a tuple."""

    stream: str = ""
    layer: int | None = None
    place: Place = Place("", "")
    item: int | None = None

    def read(self, model: Any) -> Any:
        """Its value, in a block; ``model.logits`` and the like by their names. Raises ``ArgumentError`` if that
        is a tuple and no item of it is named."""
        if self.stream:
            stream = getattr(model, self.stream)
            return stream if self.layer is None else stream[self.layer]
        value: Any = getattr(model.get(self.place.path), self.place.site)
        if self.item is None and isinstance(value, (tuple, list)):
            raise ArgumentError(
                f"`{self}` is a {type(value).__name__} of {len(value)}, not a tensor: name one part of it, as "
                f"`{self}[0]`"
            )
        return value if self.item is None else value[self.item]

    def __str__(self) -> str:
        if self.stream:
            return self.stream if self.layer is None else f"{self.stream}[{self.layer}]"
        return str(self.place) if self.item is None else f"{self.place}[{self.item}]"


def named(names: Sequence[str], what: str, layers: int, outline: Outline, streams: Sequence[str] = ()) -> list[Named]:
    """What the names mean, each once. ``what``: the argument that has them, for errors. ``streams``: further
    ones of the whole model.

    Raises ``UnknownModuleError`` for a pattern that means no module, ``ArgumentError`` for what names no place.
    """
    whole = (*MODEL_STREAMS, *streams)
    return list(dict.fromkeys(one for name in names for one in _meant(name, what, layers, outline, whole)))


def _meant(name: str, what: str, layers: int, outline: Outline, whole: Sequence[str]) -> list[Named]:
    standard = _STANDARD.fullmatch(name)
    if standard and standard[1] in whole:
        if standard[2] is not None:
            raise ArgumentError(f"{what}: `{name}`: {standard[1]} is of the whole model, without an index")
        return [Named(standard[1])]
    if standard and standard[1] in LAYER_STREAMS:
        return [Named(standard[1], layer) for layer in _layers(name, standard, what, layers)]
    module = _MODULE.fullmatch(name)
    if module is None:
        raise ArgumentError(
            f"{what}: `{name}` names no place; give a module's (`model.layers.*.output`, `.input`) or a standard name "
            f"(`resid_post`, `resid_post[3]`, `resid_post[4:8]`)"
        )
    path, site, item = module.groups()
    places = [Place(each, site.removesuffix("s")) for each in matching(path, outline)]
    return [Named(place=place, item=None if item is None else int(item)) for place in places]


def _layers(name: str, match: re.Match[str], what: str, count: int) -> Sequence[int]:
    _, first, colon, last = match.groups()
    if not count:
        return [0]  # an architecture that is not known, which whoever reads there is told
    layers = range(count)
    chosen: Sequence[int] = []
    if first is None:
        chosen = layers
    elif colon:
        chosen = layers[int(first) if first else None : int(last) if last else None]
    elif first and not last and -count <= int(first) < count:
        chosen = [layers[int(first)]]
    if not chosen:
        raise ArgumentError(f"{what}: `{name}` means no layer; this model has layers 0 to {count - 1}")
    return chosen
