"""Tiny random models of every architecture that insitu knows, and where transformers computes their streams."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests import models

LAYERS, WIDTH, HEADS, KV_HEADS, CONTEXT, EXPERTS = 3, 128, 4, 2, 256, 4
HEAD = WIDTH // HEADS

_PLAIN = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": KV_HEADS}
_HEADED = {**_GROUPED, "head_dim": HEAD}
_GPT = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": CONTEXT}
_WINDOWED = ["full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Reference:
    """Paths in transformers' model. ``attn`` and ``mlp`` return what, times ``multiplier``, is added."""

    trunk: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    attn: str = "self_attn"
    mlp: str = "mlp"
    multiplier: float = 1.0
    embed_scale: float = 1.0
    pos_embed: str = ""
    router: str = ""

    def path(self, name: str) -> str:
        return f"{self.trunk}.{name}"

    def layer(self, i: int) -> str:
        return f"{self.trunk}.{self.layers}.{i}"


@dataclass(frozen=True)
class Architecture:
    """``config``: the name of transformers' config class. ``absent``: the names that the forward computes nowhere."""

    config: str
    settings: Mapping[str, Any]
    reference: Reference = field(default_factory=Reference)
    absent: tuple[str, ...] = ("pos_embed", "router_logits")
    quick: bool = False
    note: str = ""

    @property
    def has_experts(self) -> bool:
        return bool(self.reference.router)


_TRANSFORMER = {"trunk": "transformer", "layers": "h"}
_GPT2 = Reference(**_TRANSFORMER, embed="wte", norm="ln_f", attn="attn", pos_embed="wpe")
_FALCON = Reference(**_TRANSFORMER, embed="word_embeddings", norm="ln_f", attn="self_attention")
_BLOOM = Reference(
    **_TRANSFORMER,
    embed="word_embeddings",
    norm="ln_f",
    attn="self_attention.dense",
    mlp="mlp.dense_4h_to_h",
)
_OPT = Reference("model.decoder", norm="final_layer_norm", mlp="fc2", pos_embed="embed_positions")
_NEOX = Reference("gpt_neox", embed="embed_in", norm="final_layer_norm", attn="attention")
_SANDWICH = Reference(attn="post_attention_layernorm", mlp="post_feedforward_layernorm")
_SCALED = WIDTH**0.5
_MOE = Reference(router="mlp.gate")
_DENSE = ("pos_embed", "router_logits")
_PARALLEL = ("pos_embed", "resid_mid", "router_logits")
_EXPERTS = ("pos_embed",)
_GEMMA = {**_HEADED, "hidden_activation": "gelu_pytorch_tanh"}
_GRANITE = {
    **_GROUPED,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}

# Those with experts come first: vLLM has no expert group unless the first engine of a process has experts.
ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": Architecture(
        "MixtralConfig",
        {**_HEADED, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        _MOE,
        _EXPERTS,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "shared_expert_intermediate_size": WIDTH,
            "mlp_only_layers": [0],
        },
        _MOE,
        _EXPERTS,
        note="shared expert; layer 0 dense",
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig",
        {**_HEADED, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH},
        _MOE,
        _EXPERTS,
    ),
    "olmoe": Architecture(
        "OlmoeConfig", {**_GROUPED, "num_experts": EXPERTS, "num_experts_per_tok": 2}, _MOE, _EXPERTS
    ),
    "granite_moe": Architecture(
        "GraniteMoeConfig",
        {**_GRANITE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        Reference(mlp="block_sparse_moe", multiplier=0.22, router="block_sparse_moe.router"),
        _EXPERTS,
        note="multipliers",
    ),
    "ernie4_5_moe": Architecture(
        "Ernie4_5_MoeConfig",
        {
            **_GROUPED,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_intermediate_size": WIDTH,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
        _MOE,
        _EXPERTS,
        note="shared expert; layer 0 dense",
    ),
    "gpt2": Architecture("GPT2Config", _GPT, _GPT2, ("router_logits",), quick=True, note="learned positions"),
    "llama": Architecture("LlamaConfig", _HEADED, quick=True),
    "gemma2": Architecture(
        "Gemma2Config",
        {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 8, "final_logit_softcapping": 5.0},
        replace(_SANDWICH, embed_scale=_SCALED),
        quick=True,
        note="norms after sublayers, scaled embedding, capped logits",
    ),
    "granite": Architecture(
        "GraniteConfig", _GRANITE, Reference(multiplier=0.22), quick=True, note="multipliers, scaled logits"
    ),
    "opt": Architecture(
        "OPTConfig",
        {**_PLAIN, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
        _OPT,
        ("router_logits",),
        note="learned positions",
    ),
    "opt_post_norm": Architecture(
        "OPTConfig",
        {**_PLAIN, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH // 2, "do_layer_norm_before": False},
        _OPT,
        ("router_logits", "resid_mid", "final_norm"),
        note="the stream itself is normed, embedding projected (as in OPT-350m)",
    ),
    "gpt_neox": Architecture("GPTNeoXConfig", _PLAIN, _NEOX, _PARALLEL, note="parallel blocks"),
    "gpt_neox_sequential": Architecture(
        "GPTNeoXConfig", {**_PLAIN, "use_parallel_residual": False}, _NEOX, note="blocks not parallel"
    ),
    "gpt_j": Architecture(
        "GPTJConfig",
        {**_GPT, "rotary_dim": HEAD // 2, "tie_word_embeddings": False},
        Reference(**_TRANSFORMER, embed="wte", norm="ln_f", attn="attn"),
        _PARALLEL,
        note="parallel blocks",
    ),
    "mistral": Architecture("MistralConfig", {**_HEADED, "sliding_window": 8}, note="sliding window"),
    "qwen2": Architecture("Qwen2Config", _GROUPED),
    "qwen3": Architecture("Qwen3Config", {**_HEADED, "tie_word_embeddings": True}, note="tied embedding"),
    "gemma": Architecture("GemmaConfig", _GEMMA, Reference(embed_scale=_SCALED), note="scaled embedding"),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": _WINDOWED},
        replace(_SANDWICH, embed_scale=_SCALED),
        note="norms after sublayers, scaled embedding",
    ),
    "phi": Architecture(
        "PhiConfig",
        {**_PLAIN, "intermediate_size": 4 * WIDTH},
        Reference(norm="final_layernorm"),
        _PARALLEL,
        note="parallel blocks",
    ),
    "phi3": Architecture("Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "olmo": Architecture("OlmoConfig", {**_GROUPED, "clip_qkv": None}, note="vLLM runs transformers' own code"),
    "olmo2": Architecture(
        "Olmo2Config", _GROUPED, _SANDWICH, note="norms after sublayers; vLLM runs transformers' own code"
    ),
    "olmo3": Architecture(
        "Olmo3Config",
        {**_GROUPED, "sliding_window": 8, "layer_types": _WINDOWED},
        _SANDWICH,
        note="norms after sublayers",
    ),
    "falcon": Architecture(
        "FalconConfig",
        {**_PLAIN, "multi_query": True, "parallel_attn": True},
        _FALCON,
        _PARALLEL,
        note="parallel blocks",
    ),
    "falcon_new": Architecture(
        "FalconConfig",
        {**_PLAIN, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
        _FALCON,
        _PARALLEL,
        note="parallel blocks with two norms (as in Falcon-40B)",
    ),
    "falcon_sequential": Architecture(
        "FalconConfig",
        {**_PLAIN, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        _FALCON,
        note="ALiBi, biases added outside the sublayer (as in Falcon-RW)",
    ),
    "bloom": Architecture(
        "BloomConfig",
        {**_GPT, "hidden_size": WIDTH},
        _BLOOM,
        note="ALiBi, normed embedding; vLLM's GELU is exact, transformers' by tanh",
    ),
    "stablelm": Architecture("StableLmConfig", _GROUPED),
    "starcoder2": Architecture("Starcoder2Config", _GROUPED, note="vLLM runs transformers' own code"),
    "mpt": Architecture(
        "MptConfig",
        {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": CONTEXT, "learned_pos_emb": False},
        Reference("transformer", "blocks", "wte", "norm_f", "attn", "ffn.down_proj"),
        note="ALiBi",
    ),
    "cohere": Architecture(
        "CohereConfig", {**_GROUPED, "logit_scale": 0.25}, absent=_PARALLEL, note="parallel blocks, scaled logits"
    ),
    "cohere2": Architecture(
        "Cohere2Config",
        {**_GROUPED, "logit_scale": 0.25, "sliding_window": 8, "layer_types": _WINDOWED},
        absent=_PARALLEL,
        note="parallel blocks, scaled logits",
    ),
    "arcee": Architecture("ArceeConfig", _GROUPED),
    "apertus": Architecture("ApertusConfig", _GROUPED, note="vLLM keeps the activation's parameters in bfloat16"),
    "ernie4_5": Architecture("Ernie4_5Config", _HEADED),
    "exaone4": Architecture(
        "Exaone4Config",
        {**_GROUPED, "sliding_window": 8, "layer_types": _WINDOWED},
        _SANDWICH,
        note="norms after sublayers",
    ),
    "glm": Architecture("GlmConfig", {**_HEADED, "pad_token_id": 0}),
    "glm4": Architecture(
        "Glm4Config",
        {**_HEADED, "pad_token_id": 0},
        Reference(attn="post_self_attn_layernorm", mlp="post_mlp_layernorm"),
        note="norms before and after sublayers",
    ),
    "hunyuan": Architecture("HunYuanDenseV1Config", {**_HEADED, "use_qk_norm": True}),
    "hyperclovax": Architecture(
        "HyperCLOVAXConfig",
        {**_GRANITE, "use_post_norm": True},
        Reference(attn="post_norm1", mlp="post_norm2", multiplier=0.22),
        note="norms before and after sublayers, multipliers",
    ),
    "jais2": Architecture("Jais2Config", _HEADED, absent=_PARALLEL, note="sums the stream after attention up twice"),
    "nemotron": Architecture("NemotronConfig", _GROUPED),
    "seed_oss": Architecture("SeedOssConfig", _HEADED),
    "smollm3": Architecture("SmolLM3Config", {**_GROUPED, "pad_token_id": 0}, note="vLLM runs transformers' own code"),
    "gpt_bigcode": Architecture(
        "GPTBigCodeConfig",
        {**_GPT, "n_inner": 2 * WIDTH},
        _GPT2,
        ("router_logits",),
        note="learned positions; vLLM runs transformers' own code",
    ),
}


def tiny(name: str) -> str:
    """The folder of the tiny model of an architecture, always with the same weights."""
    digest = hashlib.sha256(repr(ARCHITECTURES[name]).encode() + Path(models.__file__).read_bytes())
    folder = models.CACHE / f"{name}-{digest.hexdigest()[:12]}-{transformers.__version__}"
    if not folder.exists():
        models.CACHE.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=models.CACHE)
        _build(name, scratch)
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return str(folder)


def _build(name: str, folder: str) -> None:
    architecture = ARCHITECTURES[name]
    tokenizer = models._tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {"vocab_size": len(tokenizer), "dtype": "float32", "initializer_range": 0.2, **ids}
    config = getattr(transformers, architecture.config)(**{**common, **architecture.settings})
    with torch.random.fork_rng():
        torch.manual_seed(list(ARCHITECTURES).index(name))
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms' scales and biases: a model of ones and zeros hides mistakes
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_class(name: str) -> str:
    """The model class that the config asks for."""
    return json.loads((Path(tiny(name)) / "config.json").read_text())["architectures"][0]
