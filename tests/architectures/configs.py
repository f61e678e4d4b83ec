"""Small configs of every architecture that insitu knows, and where transformers computes their streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
_ROPE |= {"original_max_position_embeddings": CONTEXT}
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
_UNCAPPED = {"final_logit_softcapping": None}
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
    "mellum": Architecture(
        "MellumConfig",
        {
            **_HEADED,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "sliding_window": CONTEXT,
            "layer_types": _WINDOWED,
        },
        _MOE,
        _EXPERTS,
        note="vLLM does not take its window from the config",
    ),
    "flex_olmo": Architecture(
        "FlexOlmoConfig",
        {**_GROUPED, "num_experts": EXPERTS, "num_experts_per_tok": 2, "pad_token_id": 0},
        replace(_SANDWICH, router="mlp.gate"),
        _EXPERTS,
        note="norms after sublayers",
    ),
    "glm4_moe": Architecture(
        "Glm4MoeConfig",
        {
            **_HEADED,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "first_k_dense_replace": 1,
        },
        _MOE,
        _EXPERTS,
        note="shared expert; layer 0 dense",
    ),
    "hunyuan_moe": Architecture(
        "HunYuanMoEV1Config",
        {
            **_HEADED,
            "num_experts": EXPERTS,
            "moe_topk": 2,
            "moe_intermediate_size": 2 * WIDTH,
            "use_mixed_mlp_moe": True,
            "num_shared_expert": 1,
            "use_qk_norm": True,
        },
        Reference(router="mlp.gate.wg"),
        _EXPERTS,
        note="shared expert",
    ),
    "granite_moe_shared": Architecture(
        "GraniteMoeSharedConfig",
        {**_GRANITE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": WIDTH},
        Reference(mlp="block_sparse_moe", multiplier=0.22, router="block_sparse_moe.router"),
        ("pos_embed", "mlp_out"),
        note="multipliers; no `mlp_out`: the layer itself adds up experts and shared expert",
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
        note="as OPT-350m: the stream itself is normed, no `final_norm`",
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
    "cwm": Architecture("CwmConfig", {**_HEADED, "sliding_window": 8, "layer_types": _WINDOWED}),
    "ministral3": Architecture("Ministral3Config", {**_HEADED, "rope_parameters": _ROPE}),
    "helium": Architecture("HeliumConfig", _HEADED, note="vLLM runs transformers' own code"),
    "vaultgemma": Architecture(
        "VaultGemmaConfig",
        {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": _WINDOWED} | _UNCAPPED,
        note="scaled embedding; vLLM runs transformers' own code, and does not cap its logits",
    ),
    "smollm3": Architecture("SmolLM3Config", {**_GROUPED, "pad_token_id": 0}, note="vLLM runs transformers' own code"),
    "gpt_bigcode": Architecture(
        "GPTBigCodeConfig",
        {**_GPT, "n_inner": 2 * WIDTH},
        _GPT2,
        ("router_logits",),
        note="learned positions; vLLM runs transformers' own code",
    ),
}
