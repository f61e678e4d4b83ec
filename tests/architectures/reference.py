"""The streams that transformers computes, and computes when one of them is edited on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from tests import models
from tests.architectures.configs import ARCHITECTURES, LAYERS, Reference
from tests.architectures.tiny import model_class, tiny

Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Streams:
    """Every standard name that transformers computes, ``[tokens, width]`` each; ``logits`` of every position."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, int | None]) -> torch.Tensor:
        name, layer = key
        return self.values[name] if layer is None else self.layers[name][layer]

    def _set(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.layers.setdefault(name, {})[layer] = value


@functools.cache
def oracle(name: str) -> nn.Module:
    """The transformers model of an architecture, in float32. To be loaded before vLLM runs the same one:
    vLLM changes transformers' classes where it runs their code."""
    # With ALiBi and attention written out, Falcon adds the biases twice.
    attention = "sdpa" if name.startswith("falcon") else "eager"
    kind = getattr(transformers, model_class(name))
    model = kind.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation=attention).eval()
    model.base_model.do_not_compile = True  # asked by vLLM's changed classes
    for module in model.modules():
        _as_vllm(module)
    return model


def _as_vllm(module: nn.Module) -> None:
    """Where vLLM computes with other functions than transformers, transformers gets vLLM's."""
    kind = type(module).__name__
    if kind == "BloomGelu":
        module.forward = nn.functional.gelu
    elif kind == "XIELUActivation":
        module.bfloat16()


def streams(name: str, ids: Sequence[int], edit: tuple[str, int | None, Edit] | None = None) -> Streams:
    """One forward of transformers over ``ids``, ``edit`` made in it: (standard name, layer, function of its value)."""
    at, model = ARCHITECTURES[name].reference, oracle(name)
    with ExitStack() as hooks:
        if edit is not None:
            hooks.enter_context(_edited(model, at, *edit))
        seen = models.hf_activations(model, ids)
    found = Streams()
    out = {path: _first(each.output) for path, each in seen.items()}
    found.values["embed"] = out[at.path(at.embed)] / at.embed_scale
    if at.pos_embed:
        found.values["pos_embed"] = out[at.path(at.pos_embed)]
    if at.path(at.norm) in out:
        found.values["final_norm"] = out[at.path(at.norm)]
    found.values["logits"] = seen[""].output["logits"]
    for i in range(LAYERS):
        layer = at.layer(i)
        found._set("resid_pre", i, seen[layer].input)
        found._set("attn_out", i, out[f"{layer}.{at.attn}"] * at.multiplier)
        found._set("resid_mid", i, found["resid_pre", i] + found["attn_out", i])
        found._set("mlp_out", i, out[f"{layer}.{at.mlp}"] * at.multiplier)
        found._set("resid_post", i, out[layer])
        router = f"{layer}.{at.router}"
        if at.router and router in seen:
            module = model.get_submodule(router)
            given = seen[router].input.reshape(-1, module.weight.shape[-1])
            found._set("router_logits", i, nn.functional.linear(given, module.weight, getattr(module, "bias", None)))
    return found


@contextmanager
def _edited(model: nn.Module, at: Reference, name: str, layer: int | None, edit: Edit) -> Iterator[None]:
    whole_model = {"embed": at.embed, "pos_embed": at.pos_embed, "final_norm": at.norm}
    if name in whole_model:
        scale = at.embed_scale if name == "embed" else 1.0
        with _output(model, at.path(whole_model[name]), lambda value: edit(value / scale) * scale):
            yield
        return
    path = at.layer(layer or 0)
    if name == "resid_pre":
        with _input(model, path, edit):
            yield
    elif name == "resid_post":
        with _output(model, path, edit):
            yield
    elif name in ("attn_out", "mlp_out"):
        module = at.attn if name == "attn_out" else at.mlp
        with _output(model, f"{path}.{module}", lambda value: edit(value * at.multiplier) / at.multiplier):
            yield
    elif name == "resid_mid":
        before: list[torch.Tensor] = []

        def moved(value: torch.Tensor) -> torch.Tensor:
            return (edit(before[0] + value * at.multiplier) - before[0]) / at.multiplier

        with _input(model, path, lambda value: before.append(value.clone()) or value):
            with _output(model, f"{path}.{at.attn}", moved):
                yield
    elif name == "router_logits":
        with _linear(model.get_submodule(f"{path}.{at.router}").weight, edit):
            yield


@contextmanager
def _output(model: nn.Module, path: str, edit: Edit) -> Iterator[None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_unbatched(output[0], edit), *output[1:])
        return _unbatched(output, edit)

    handle = model.get_submodule(path).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _input(model: nn.Module, path: str, edit: Edit) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_unbatched(args[0], edit), *args[1:]), kwargs

    handle = model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _linear(weight: torch.Tensor, edit: Edit) -> Iterator[None]:
    """Routers of transformers are modules of many shapes, and all multiply by their weight."""
    linear = nn.functional.linear

    def edited(input: torch.Tensor, by: torch.Tensor, *bias: Any) -> torch.Tensor:
        output = linear(input, by, *bias)
        same = by.shape == weight.shape and torch.equal(by.float(), weight)
        return edit(output) if same else output

    nn.functional.linear = edited
    try:
        yield
    finally:
        nn.functional.linear = linear


def _unbatched(value: torch.Tensor, edit: Edit) -> torch.Tensor:
    return edit(value.clone().reshape(-1, value.shape[-1])).reshape(value.shape)


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output
