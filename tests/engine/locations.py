"""What transformers computes at each of vLLM's module locations.

A rule says what a module of vLLM takes and returns in terms of what modules of transformers take and return;
`{i}` in a path is a layer's number. Tensors are listed in the order in which they stand in vLLM's arguments
or result, whatever tuples they are in. Where vLLM fuses projections, the reference is their concatenation;
where its norms carry the residual along, it is the pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.models import LAYERS, Activation

Seen = Mapping[str, Activation]
Tensors = list[torch.Tensor]
Reference = Callable[["Values", int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """The tensors that go in, ids and positions among them, and those that come out."""

    inputs: Reference
    output: Reference


@dataclass(frozen=True)
class Values:
    """What transformers computed for one prompt, by paths relative to the layer asked for."""

    ids: Sequence[int]
    seen: Seen
    layers: str

    def into(self, path: str, i: int | None = None) -> torch.Tensor:
        return self._of(path, i).input

    def out(self, path: str, i: int | None = None) -> torch.Tensor:
        output = self._of(path, i).output
        return output[0] if isinstance(output, tuple) else output

    def _of(self, path: str, i: int | None) -> Activation:
        return self.seen[path if i is None else f"{self.layers}.{i}.{path}".rstrip(".")]

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor(self.ids)

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(len(self.ids))

    @property
    def last_logits(self) -> torch.Tensor:
        return self.seen[""].output["logits"][-1:]


def _gpt2() -> dict[str, Rule]:
    def qkv(v: Values, i: int) -> Tensors:
        return list(v.out("attn.c_attn", i).chunk(3, dim=-1))

    rules = {
        "transformer": Rule(lambda v, i: [v.tokens, v.positions], lambda v, i: [v.out("transformer.ln_f")]),
        "transformer.wte": Rule(lambda v, i: [v.tokens], lambda v, i: [v.out("transformer.wte")]),
        "transformer.wpe": Rule(lambda v, i: [v.positions], lambda v, i: [v.out("transformer.wpe")]),
        "transformer.ln_f": _same("transformer.ln_f"),
        "transformer.h.{i}.attn.attn": Rule(qkv, lambda v, i: [v.into("attn.c_proj", i)]),
        "logits_processor": Rule(lambda v, i: [v.out("transformer.ln_f")[-1:]], lambda v, i: [v.last_logits]),
    }
    attention, mlp = ["attn", "attn.c_attn", "attn.c_proj"], ["mlp", "mlp.c_fc", "mlp.act", "mlp.c_proj"]
    for path in ["ln_1", *attention, "ln_2", *mlp]:
        rules[f"transformer.h.{{i}}.{path}"] = _same_in_layer(path)
    return rules | {"transformer.h.{i}": _same_in_layer("")}


def _llama_like() -> dict[str, Rule]:
    """Llama and those built like it, their feed-forward modules left out."""

    def split(v: Values, i: int) -> Tensors:
        return [v.out(f"self_attn.{name}_proj", i) for name in "qkv"]

    def rotated(v: Values, i: int) -> Tensors:
        return list(_rotated(v, *split(v, i)[:2]))

    def into_norm(v: Values, i: int) -> Tensors:
        """A layer's stream in two parts, as the layer before left them."""
        return [v.into("", 0)] if i == 0 else [v.out("mlp", i - 1), v.into("post_attention_layernorm", i - 1)]

    def with_stream(normed: str) -> Reference:
        return lambda v, i: [v.out(normed, i)] + ([v.into(normed, i)] if i or "post" in normed else [])

    rules = {
        "model": Rule(lambda v, i: [v.tokens, v.positions], lambda v, i: [v.out("model.norm")]),
        "model.embed_tokens": Rule(lambda v, i: [v.tokens], lambda v, i: [v.out("model.embed_tokens")]),
        "model.norm": Rule(lambda v, i: into_norm(v, LAYERS), lambda v, i: [v.out("model.norm"), v.into("model.norm")]),
        "model.layers.{i}": Rule(
            lambda v, i: [v.positions, *into_norm(v, i)],
            lambda v, i: [v.out("mlp", i), v.into("post_attention_layernorm", i)],
        ),
        "model.layers.{i}.input_layernorm": Rule(into_norm, with_stream("input_layernorm")),
        "model.layers.{i}.post_attention_layernorm": Rule(
            lambda v, i: [v.out("self_attn", i), v.into("", i)], with_stream("post_attention_layernorm")
        ),
        "model.layers.{i}.self_attn": Rule(
            lambda v, i: [v.positions, v.out("input_layernorm", i)], lambda v, i: [v.out("self_attn", i)]
        ),
        "model.layers.{i}.self_attn.qkv_proj": Rule(
            lambda v, i: [v.into("self_attn.q_proj", i)], lambda v, i: [torch.cat(split(v, i), -1)]
        ),
        "model.layers.{i}.self_attn.rotary_emb": Rule(lambda v, i: [v.positions, *split(v, i)[:2]], rotated),
        "model.layers.{i}.self_attn.attn": Rule(
            lambda v, i: [*rotated(v, i), v.out("self_attn.v_proj", i)],
            lambda v, i: [v.into("self_attn.o_proj", i)],
        ),
        "logits_processor": Rule(lambda v, i: [v.out("model.norm")[-1:]], lambda v, i: [v.last_logits]),
    }
    return rules | {"model.layers.{i}.self_attn.o_proj": _same_in_layer("self_attn.o_proj")}


def _llama() -> dict[str, Rule]:
    def gate_up(v: Values, i: int) -> Tensors:
        return [torch.cat([v.out("mlp.gate_proj", i), v.out("mlp.up_proj", i)], -1)]

    return _llama_like() | {
        "model.layers.{i}.mlp": _same_in_layer("mlp"),
        "model.layers.{i}.mlp.gate_up_proj": Rule(lambda v, i: [v.into("mlp.gate_proj", i)], gate_up),
        "model.layers.{i}.mlp.act_fn": Rule(gate_up, lambda v, i: [v.into("mlp.down_proj", i)]),
        "model.layers.{i}.mlp.down_proj": _same_in_layer("mlp.down_proj"),
    }


def _qwen3() -> dict[str, Rule]:
    def normed(v: Values, i: int) -> Tensors:
        return [v.out(f"self_attn.{name}_norm", i).flatten(1) for name in "qk"]

    def rotated(v: Values, i: int) -> Tensors:
        return list(_rotated(v, *normed(v, i)))

    attention = "model.layers.{i}.self_attn"
    return _llama() | {
        f"{attention}.q_norm": _same_in_layer("self_attn.q_norm"),
        f"{attention}.k_norm": _same_in_layer("self_attn.k_norm"),
        f"{attention}.rotary_emb": Rule(lambda v, i: [v.positions, *normed(v, i)], rotated),
        f"{attention}.attn": Rule(
            lambda v, i: [*rotated(v, i), v.out("self_attn.v_proj", i)],
            lambda v, i: [v.into("self_attn.o_proj", i)],
        ),
    }


def _mixtral() -> dict[str, Rule]:
    moe = "model.layers.{i}.block_sparse_moe"
    return _llama_like() | {
        moe: _same_in_layer("mlp"),
        f"{moe}.gate": Rule(lambda v, i: [v.into("mlp", i)], lambda v, i: [v.out("mlp.gate", i)]),
        f"{moe}.experts": Rule(
            lambda v, i: [v.into("mlp", i), v.out("mlp.gate", i)], lambda v, i: [v.out("mlp.experts", i)]
        ),
    }


def _same(path: str) -> Rule:
    return Rule(lambda v, i: [v.into(path)], lambda v, i: [v.out(path)])


def _same_in_layer(path: str) -> Rule:
    return Rule(lambda v, i: [v.into(path, i)], lambda v, i: [v.out(path, i)])


def _rotated(v: Values, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding, which in transformers is a function and not a module."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = v.seen["model.rotary_emb"].output
    heads = [part.unflatten(-1, (-1, cos.shape[-1])) for part in (query, key)]
    first, second = apply_rotary_pos_emb(*heads, cos, sin)
    return first.flatten(1), second.flatten(1)


RULES: dict[str, dict[str, Rule]] = {
    "gpt2": _gpt2(),
    "llama": _llama(),
    "qwen3": _qwen3(),
    "mixtral": _mixtral(),
}

# Modules that the forward does not call, and why. Reading one of them is an error, which is tested as well.
NEVER_CALLED: dict[str, str] = {
    r"": "the whole model has the places model.logits and model.samples",
    r"model\.layers|transformer\.h": "a list is not called",
    r"lm_head": "vLLM computes logits from its weight without calling it; model.logits are compared",
    r".*\.rotary_emb\.apply_rotary_emb": "the CPU's rotary embedding is one operation and does not call it",
    r".*\.experts\.routed_experts(\.quant_method)?": "the fused experts are one operation and do not call it",
}


def layer_of(path: str) -> tuple[str, int]:
    """A path with its layer's number taken out, and the number (0 where it has none)."""
    found = re.search(r"\.(\d+)(?=\.|$)", path)
    if found is None:
        return path, 0
    return f"{path[: found.start()]}.{{i}}{path[found.end() :]}", int(found[1])


def reason_to_skip(path: str) -> str | None:
    return next((why for pattern, why in NEVER_CALLED.items() if re.fullmatch(pattern, path)), None)


def tensors_in(value: Any) -> Tensors:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    parts = value if isinstance(value, tuple | list) else []
    return [tensor for part in parts for tensor in tensors_in(part)]
