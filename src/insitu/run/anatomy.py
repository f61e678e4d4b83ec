"""Where the standard names lie in an architecture's modules.

One row an architecture, and only for those whose forward was read: in another forward (parallel
blocks, norms after the sublayer, multipliers) the same modules mean something else, and a name must
refuse there, not guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.modules import ModuleTable
from insitu.tree import Place, join

Parts = Callable[[Any], list[torch.Tensor]]


@dataclass(frozen=True)
class Stream:
    """A stream as the sum of some tensors of one place, which ``parts`` picks from its value."""

    place: Place
    parts: Parts


@dataclass(frozen=True)
class Layout:
    """Paths of an architecture's parts: the trunk's from the root, a layer's from the layer."""

    layers: str
    embed: str
    norm: str
    attn: str
    mlp: str
    norm_mid: str


def _llama(mlp: str) -> Layout:
    return Layout("model.layers", "model.embed_tokens", "model.norm", "self_attn", mlp, "post_attention_layernorm")


_LAYOUTS = {
    "GPT2LMHeadModel": Layout("transformer.h", "transformer.wte", "transformer.ln_f", "attn", "mlp", "ln_2"),
    "LlamaForCausalLM": _llama("mlp"),
    "MixtralForCausalLM": _llama("block_sparse_moe"),
    "Qwen2ForCausalLM": _llama("mlp"),
    "Qwen3ForCausalLM": _llama("mlp"),
}


class Anatomy:
    """The standard names of one model. Each raises ``LocationError`` where they are not known."""

    def __init__(self, modules: ModuleTable) -> None:
        self._architecture = type(modules.root).__name__
        self._layout = _LAYOUTS.get(self._architecture)
        prefix = join(self._layout.layers, "") if self._layout else ""
        self.layers = sum(path.startswith(prefix) and path[len(prefix) :].isdigit() for path in modules.by_path)

    def stream(self, name: str, layer: int | None = None) -> Stream:
        layout = self._known(f"`model.{name}`")
        at = join(layout.layers, str(layer))
        places = {
            "embed": (layout.embed, "output", _first),
            "final_norm": (layout.norm, "output", _first),
            "resid_pre": (at, "input", _floating),
            "attn_out": (join(at, layout.attn), "output", _first),
            "resid_mid": (join(at, layout.norm_mid), "input", _floating),
            "mlp_out": (join(at, layout.mlp), "output", _first),
            "resid_post": (at, "output", _floating),
        }
        path, site, parts = places[name]
        return Stream(Place(path, site), parts)

    @property
    def norm(self) -> str:
        """Path of the norm before the unembedding."""
        return self._known("the final norm").norm

    def _known(self, what: str) -> Layout:
        if self._layout is None:
            raise LocationError(
                f"{what} is not known for {self._architecture}: insitu knows where it lies in "
                f"{', '.join(sorted(_LAYOUTS))}. Read the modules by their own names instead (print(model))"
            )
        return self._layout


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _first(value: Any) -> list[torch.Tensor]:
    return _tensors(value)[:1]


def _floating(value: Any) -> list[torch.Tensor]:
    """The stream itself, or the two whose sum it is where vLLM fuses the addition into the next norm.

    Positions, which a layer is called with too, are integers.
    """
    return [tensor for tensor in _tensors(value) if tensor.is_floating_point()]
