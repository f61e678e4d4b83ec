"""Models for the tests of two GPUs, and what blocks do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run import Cache

LAYERS, WIDTH, HEAD, VOCABULARY = 4, 512, 64, 2048
KV_HEADS = {"llama": 4, "qwen3": 1, "mixtral": 2}
"""Of Qwen 3 a single one, which two ranks both have."""


def save_model(name: str, folder: str) -> None:
    """A random model in bfloat16 whose values are neither tiny nor all alike, its norms' scales random too."""
    import transformers

    kinds = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral"}
    settings: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS[name], "head_dim": HEAD, "vocab_size": VOCABULARY, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": 2048, "initializer_range": 0.06, "tie_word_embeddings": False,
    }  # fmt: skip
    if name == "mixtral":  # all experts, weighted: which of two near ones is the better is a matter of rounding
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kinds[name]}Config")(**settings)
    model = getattr(transformers, f"{kinds[name]}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The floating tensors in lists, tuples, dicts and caches, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Cache):
        return tensors_of([_recorded(value[path], site) for path in sorted(value) for site in ("inputs", "output")])
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, (list, tuple)) else []


def _recorded(cached: Any, site: str) -> Any:
    try:
        return getattr(cached, site)
    except LocationError:
        return None


def largest_difference(ours: Any, wanted: Any, what: str, bound: float) -> float:
    """Of each tensor, relative to what is wanted: by norm, and its largest value. Asserted to be below ``bound``."""
    ours, wanted = tensors_of(ours), tensors_of(wanted)
    assert len(ours) == len(wanted) > 0
    worst = 0.0
    for i, (one, two) in enumerate(zip(ours, wanted, strict=True)):
        assert one.shape == two.shape, f"{what}, value {i}"
        one, two = one.float().cpu(), two.float().cpu()
        apart = max((norm(one - two) / norm(two).clamp(min=1e-6)).item() for norm in (torch.norm, _largest))
        assert apart < bound, f"{what}, value {i} of {len(ours)} {tuple(one.shape)}: {apart:.2g} apart"
        worst = max(worst, apart)
    return worst


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().max()


# -- blocks -----------------------------------------------------------------------------------


def feed_forward(model: Any, layer: int) -> Any:
    module = model.model.layers[layer]
    return module.mlp if "mlp" in dir(module) else module.block_sparse_moe


def ramp(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-2, 2, like.numel()).reshape(like.shape).to(like)


def standard_names(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        seen.append(model.embed)
        for i in range(LAYERS):
            seen += [model.resid_pre[i], model.q[i], model.k[i], model.v[i], model.attn_pattern[i], model.attn_out[i]]
            seen += [model.resid_mid[i], model.mlp_out[i], model.resid_post[i]]
        seen += [model.final_norm, model.logits]
    return seen


def fused_projections(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        for layer in model.model.layers:
            attention = layer.self_attn
            seen += [attention.qkv_proj.output[0], attention.attn.inputs, attention.attn.output, attention.o_proj.input]
            if "mlp" in dir(layer):
                seen += [layer.mlp.gate_up_proj.output[0], layer.mlp.act_fn.output, layer.mlp.down_proj.input]
        seen.append(model.model.norm.output)
    return seen


def experts(model: Any, tracer: Any) -> Any:
    moe = [layer.block_sparse_moe for layer in model.model.layers]
    return [[(each.gate.output, each.experts.inputs, each.experts.output) for each in moe] for _ in tracer.iter[:]]


def edits_in_place(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        model.embed[:] *= 0.5
        layers[0].self_attn.qkv_proj.output[0][:, 100:700] *= 1.5
        layers[0].self_attn.attn.output[:, WIDTH // 3 :] += 0.5
        layers[0].self_attn.o_proj.input[:, ::3] = 0
        seen.append(model.resid_post[0])
        feed_forward(model, 1).output[:] += 1
        model.resid_post[2] *= 0.5
        seen += [model.resid_post[3], model.logits]
    return seen


def edits_of_heads(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        model.q[1][:, 5] *= 0.2
        model.k[1][:, -1] += 0.5
        model.v[1][:] *= 1.5
        seen += [model.attn_out[1], model.resid_post[3], model.logits]
    return seen


def replacements(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        mixed = layers[0].self_attn.attn.output
        layers[0].self_attn.attn.output = mixed + ramp(mixed)
        layers[1].input_layernorm.output = tuple(part * 0.5 for part in layers[1].input_layernorm.output)
        given = feed_forward(model, 1).input
        feed_forward(model, 1).input = given + ramp(given)
        model.resid_post[2] = ramp(model.resid_post[2])
        seen += [mixed, model.resid_post[3], model.logits]
        model.logits = model.logits * 2
        seen.append(model.logits)
    return seen


def skips(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        layers[0].self_attn.skip(ramp(model.embed))
        feed_forward(model, 1).skip(ramp(model.resid_mid[1]))
        layers[2].self_attn.attn.skip(ramp(layers[2].self_attn.qkv_proj.input))
        seen += [model.resid_post[3], model.logits]
    return seen


def source_operations(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        attention = model.model.layers[1].self_attn.source
        parts = attention.qkv_split_0.output
        parts[0][:, :HEAD] = 0
        seen += [parts, attention.self_attn_0.output, model.resid_post[3], model.logits]
    return seen


def calls(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream, layer = model.resid_post[1], model.model.layers[2]
        part = feed_forward(model, 2)(stream / stream.std(-1, keepdim=True))
        seen += [part, model.unembed(model.apply_final_norm(stream)), layer.self_attn.qkv_proj(stream)]
        model.resid_post[2] = stream + part
        seen += [model.logits]
    return seen


BLOCKS: list[Callable[[Any, Any], Any]] = [
    standard_names, fused_projections, edits_in_place, edits_of_heads, replacements, skips, source_operations, calls,
]  # fmt: skip
