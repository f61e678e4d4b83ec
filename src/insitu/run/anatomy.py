"""The standard names of one model: where each lies, or why it is nowhere.

A name is known only for architectures whose forward was read: in another forward (parallel blocks,
norms after the sublayer, multipliers) the same modules mean something else, and a name must refuse
there, not guess.
"""

from __future__ import annotations

import contextlib
from typing import Any

from insitu.block import LocationError
from insitu.run.anatomy_layouts import TRANSFORMERS_TRUNKS, VLLM_MODELS, Layout
from insitu.run.attention import is_attention, kernel_of, require_heads
from insitu.run.heads import ATTN_PATTERN, HEADS, Heads, Pattern, heads_at
from insitu.run.modules import ModuleTable
from insitu.run.stream import Stream
from insitu.tree import Place, join


class Anatomy:
    """The standard names of one model. Each raises ``LocationError`` where it is not known.

    ``batched``: tensors have a batch axis before the tokens', as in vLLM's backend for models that run
    transformers' own code.
    """

    def __init__(self, modules: ModuleTable) -> None:
        at, root = _language_model(modules)
        self._modules = modules
        self._streams: dict[tuple[str, int | None], Stream] = {}
        self._architecture = type(root).__name__
        self.batched: bool = self._architecture.startswith("Transformers")
        if self.batched:
            self._architecture = type(root.model).__name__
        rows = TRANSFORMERS_TRUNKS if self.batched else VLLM_MODELS
        row = rows.get(self._architecture)
        layout = row if isinstance(row, Layout) or row is None else row(root.config)
        self._layout = layout.below(at) if layout else None
        self.layers: int = self._count(self._layout.layers) if self._layout else 0

    def stream(self, name: str, layer: int | None = None) -> Stream:
        found = self._streams.get((name, layer))
        if found is None:
            found = self._streams[name, layer] = self._found(name, layer)
        return found

    def _found(self, name: str, layer: int | None) -> Stream:
        what = f"`model.{name}`"
        layout = self._known(what)
        if name in layout.absent:
            raise LocationError(f"{what} is not computed by {self._architecture}: {layout.absent[name]}")
        whole_model = {"embed": layout.embed, "pos_embed": layout.pos_embed, "final_norm": layout.norm}
        if name in whole_model:
            return Stream(Place(self._there(what, whole_model[name]), "output"))
        at = join(layout.layers, str(layer))
        if name in HEADS:
            return self._heads(name, at, f"`model.{name}[{layer}]`")
        if name == "router_logits":
            return Stream(Place(self._router(at, layout), "output"))
        summands, terms = 1 + layout.pair, 1 + layout.biased
        return {
            "resid_pre": Stream(Place(at, "input"), summands),
            "attn_out": Stream(Place(join(at, layout.attn), "output"), terms, layout.multiplier),
            "resid_mid": Stream(Place(join(at, layout.mid), "input"), summands),
            "mlp_out": Stream(Place(join(at, layout.mlp), "output"), terms, layout.multiplier),
            "resid_post": Stream(Place(at, "output"), summands),
        }[name]

    def layer(self, number: int) -> str:
        """Path of a layer."""
        return join(self._layout.layers, str(number)) if self._layout else ""

    @property
    def norm(self) -> str:
        """Path of the norm before the unembedding."""
        return self.stream("final_norm").place.path

    @property
    def embeds(self) -> str:
        """Path of the module that the token embedding belongs to."""
        return self._modules.owner(self._layout.embed) if self._layout else ""

    @property
    def keys(self) -> list[Heads]:
        """``k`` of every layer, as far as they are known."""
        layout, found = self._layout, []
        for layer in range(self.layers if layout else 0):
            with contextlib.suppress(LocationError):
                found.append(self.stream("k", layer))
        return found

    def _heads(self, name: str, at: str, what: str) -> Heads | Pattern:
        path = self._attention(at, what)
        module = self._modules[path]
        require_heads(module, what)
        if name != ATTN_PATTERN:
            return heads_at(path, module, name)
        q, k = (heads_at(path, module, each) for each in ("q", "k"))
        return Pattern(q.place, what=what, kernel=kernel_of(module, what), q=q, k=k)

    def _attention(self, at: str, what: str) -> str:
        inside = (path for path in self._modules.by_path if path.startswith(f"{at}."))
        found = [path for path in inside if is_attention(self._modules[path])]
        if len(found) == 1:
            return found[0]
        has = f"{len(found)} attention modules ({', '.join(found)})" if found else "no attention module"
        raise LocationError(f"{what} is not known: `{at}` of {self._architecture} has {has}, and it is that of one")

    def _known(self, what: str) -> Layout:
        if self._layout is None:
            raise LocationError(
                f"{what} is not known for {self._architecture}: insitu knows where it lies in "
                f"{', '.join(sorted({*VLLM_MODELS, *TRANSFORMERS_TRUNKS}))}. Read the modules by their own names "
                f"instead (print(model))"
            )
        return self._layout

    def _there(self, what: str, path: str) -> str:
        if not path:
            raise LocationError(
                f"{what} is not computed by {self._architecture}: it adds no positions to the stream, they enter "
                f"through attention"
            )
        return path

    def _router(self, at: str, layout: Layout) -> str:
        path = join(at, layout.router)
        if layout.router and path in self._modules.by_path:
            return path
        if layout.router:
            raise LocationError(f"`model.router_logits` is not computed everywhere: `{at}` has no experts, it is dense")
        raise LocationError(f"`model.router_logits` is not computed by {self._architecture}: it has no experts")

    def _count(self, layers: str) -> int:
        prefix = join(layers, "")
        return sum(path.startswith(prefix) and path[len(prefix) :].isdigit() for path in self._modules.by_path)


def _language_model(modules: ModuleTable) -> tuple[str, Any]:
    """The model that reads and writes text, with its path: a part of one that sees or hears as well."""
    root: Any = modules.root
    get = getattr(root, "get_language_model", None)
    if type(root).__name__ in VLLM_MODELS or get is None:
        return "", root
    inner = get()
    return modules.paths_of(inner)[0], inner
