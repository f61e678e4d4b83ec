"""Names that mean the same on every architecture, after TransformerLens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from insitu.block import ArgumentError
from insitu.tree.session import Session, current, session_for


class LayerStream:
    """One stream of the model at each layer: ``model.resid_post[3]`` is a tensor ``[tokens, d_model]``.

    Readable in a block, and writable: in-place edits and assignment change what the model goes on
    with. ``model.resid_post(3)`` reads the same. ``len`` is the number of layers. Raises
    ``LocationError`` where the architecture computes no such value.
    """

    def __init__(self, name: str, layers: Callable[[], int], owner: object = None) -> None:
        self._owner = owner
        self._name = name
        self._layers = layers
        self._count = 0  # until it is known

    def __getitem__(self, layer: int) -> Any:
        return self._session(layer).read_stream(self._name, self._index(layer))

    def __setitem__(self, layer: int, value: Any) -> None:
        self._session(layer).write_stream(self._name, self._index(layer), value)

    def __call__(self, layer: int) -> Any:
        return self[layer]

    def __len__(self) -> int:
        return self._layers()

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self._name} of each layer>"

    def _unsavable(self) -> str:
        return f"an index is missing: `model.{self._name}[i].save()` saves what it is at layer i"

    def _session(self, layer: int) -> Session:
        session = current.get()
        if session is not None and session.owner == self._owner:
            return session
        return session_for(self._at(layer), self._owner)

    def _at(self, layer: int) -> str:
        return f"`model.{self._name}[{layer}]`"

    def _index(self, layer: int) -> int:
        if type(layer) is int and 0 <= layer < self._count:
            return layer
        try:
            layer = operator.index(layer)
        except TypeError:
            raise self._not_a_layer(layer) from None
        self._count = count = len(self)
        if not count:
            return layer  # an architecture that is not known, which the session says
        if not -count <= layer < count:
            raise IndexError(f"model.{self._name} has {count} layers, 0 to {count - 1}; got {layer}")
        return layer % count

    def _not_a_layer(self, given: Any) -> ArgumentError:
        place, several = f"model.{self._name}", "range(...)"
        got = f"{type(given).__name__} {given!r}"
        if isinstance(given, slice):
            parts = [given.start, given.stop, *([] if given.step is None else [given.step])]
            got = f"the slice [{':'.join('' if part is None else str(part) for part in parts)}]"
            with suppress(TypeError):
                several = str(range(*given.indices(len(self))))
        return ArgumentError(
            f"`{place}[i]` is one layer's, i its number; got {got}. For several, in order: "
            f"`[{place}[i] for i in {several}]`"
        )


MODEL_STREAMS = ("embed", "pos_embed", "final_norm")
LAYER_STREAMS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "router_logits")
LAYER_STREAMS += ("q", "k", "v", "attn_pattern")
