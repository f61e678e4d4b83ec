"""What those who build on a model ask of its engine beside running blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from insitu.block import ArgumentError, LocationError
from insitu.tree import Named, named

if TYPE_CHECKING:
    from insitu.engine.client.engine import Engine
    from insitu.engine.client.model import VLLM


def view_of(model: VLLM) -> EngineView:
    """Builds the engine if there is none yet. Raises ``ArgumentError`` for a model at a server."""
    engine = model._running()
    if not hasattr(engine, "config"):
        raise ArgumentError("this needs an engine of this machine, `insitu.VLLM(...)`, and the model is at a server")
    return EngineView(model, engine)


def made_of(model: VLLM) -> tuple[str, dict[str, Any]]:
    """What ``VLLM`` was called with: its name, and its arguments by name."""
    engine = None if model._workers is None else "workers" if model._workers else "in-process"
    return model._repo, {"taps": model._taps, "engine": engine, **model._engine_args}


class EngineView:
    """``context``: the most tokens that a request has. ``heads`` of ``head_size`` of each layer's attention."""

    def __init__(self, model: VLLM, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        config = engine.config.model_config
        self.name: str = config.model
        self.layers: int = engine.layers
        self.dtype: str = str(config.dtype)
        self.context: int = config.max_model_len
        self.heads: int = config.hf_text_config.num_attention_heads
        self.head_size: int = config.get_head_size()

    def named(self, names: Sequence[str], what: str, streams: Sequence[str] = ()) -> list[Named]:
        """The places that names mean; see ``insitu.tree.named``."""
        return named(names, what, self._engine.layers, self._engine.outline, streams)

    def one(self, at: str) -> Named:
        """The only place that a name means. Raises ``ArgumentError`` if it means several."""
        places = self.named([at], "at")
        if len(places) != 1:
            raise ArgumentError(f"at={at!r} means {len(places)} places, and one is wanted: give `{places[0]}`, say")
        return places[0]

    def in_order(self, places: Sequence[Named], prompt: Any) -> list[Named]:
        """As the forward comes to them. ``prompt`` is run once, since that is known when a step has been watched."""
        first = places[0]

        def watched(tracer: Any) -> None:
            first.read(self._model)

        self._model.run(watched, prompt, max_tokens=1)
        order = self._engine.visits(places)
        return [place for _, place in sorted(zip(order, places, strict=True), key=lambda pair: pair[0])]

    def attention(self, layer: int) -> str:
        """The path of a layer's attention, whose output is that of its heads side by side, before they are mixed.

        Raises ``LocationError`` where the model has none.
        """
        names = self._engine.names()
        if ("q", layer) not in names.computed:
            raise LocationError(names.absent.get(("q", layer), f"there is no layer {layer}"))
        return names.computed["q", layer].place.path
