"""What those who build on a model ask of its engine beside running blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insitu.tree import Named, named

if TYPE_CHECKING:
    from insitu.engine.client.engine import Engine
    from insitu.engine.client.model import VLLM


def view_of(model: VLLM) -> EngineView:
    """Builds the engine if there is none yet."""
    return EngineView(model._running())


class EngineView:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        config = engine.config.model_config
        self.model: str = config.model
        self.dtype: str = str(config.dtype)
        self.context: int = config.max_model_len

    def named(self, names: Sequence[str], what: str, streams: Sequence[str] = ()) -> list[Named]:
        """The places that names mean; see ``insitu.tree.named``."""
        return named(names, what, self._engine.layers, self._engine.outline, streams)

    def visits(self, places: Sequence[Named]) -> list[int]:
        """When a forward comes to each, as numbers that grow; one has to have been traced."""
        return self._engine.visits(places)
