"""Where each architecture computes its streams: one row an architecture, written after reading its forward.

Rows are for vLLM's model classes, and where vLLM runs transformers' own code, for that trunk's class. A
row is a layout, or a function that makes it from the model's config where that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from insitu.tree import join


@dataclass(frozen=True)
class Layout:
    """Paths of an architecture's parts: the trunk's from the root, a layer's from the layer.

    What ``attn`` and ``mlp`` return is added to the stream, times ``multiplier``, plus a bias that they
    return beside it if ``biased``. ``mid`` is given the stream between the two additions. ``pair``: a
    layer is given and returns the stream as two summands, which the next norm adds up. ``absent`` says
    of names that the forward computes nowhere why not.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    attn: str = "self_attn"
    mlp: str = "mlp"
    mid: str = "post_attention_layernorm"
    pair: bool = False
    multiplier: float = 1.0
    biased: bool = False
    pos_embed: str = ""
    router: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)

    def below(self, at: str) -> Layout:
        """The layout of a model that holds this one at the path ``at``."""
        trunk = {name: getattr(self, name) for name in ("layers", "embed", "norm", "pos_embed")}
        return replace(self, **{name: join(at, path) for name, path in trunk.items() if at and path})


_PARALLEL = {
    "resid_mid": "attention and MLP of a layer both start from resid_pre (parallel blocks), and their outputs "
    "are added together: resid_pre + attn_out + mlp_out = resid_post"
}
_SUMMED_TWICE = {
    "resid_mid": "the stream after attention is summed up twice, once for the norm and once for the residual, so "
    "that no one tensor is it: read resid_pre + attn_out, write attn_out"
}
_NORMED_STREAM = {
    "resid_mid": "the stream itself is normed after attention and after the MLP, so that resid_pre + attn_out is "
    "not what the MLP's output is added to: use resid_pre, attn_out, mlp_out and resid_post"
}
_ADDED_BY_LAYER = {
    "mlp_out": "the layer itself adds the shared expert's output to the experts', so that no module returns the sum: "
    "read resid_post - resid_mid, write the outputs of block_sparse_moe and shared_mlp"
}
_NO_NORM = {"final_norm": "the stream is unembedded as the last layer leaves it: unembed(resid_post[last])"}

_PLAIN = Layout()
_LLAMA = Layout(pair=True)
_POST_NORM = Layout(attn="post_attention_layernorm", mid="mlp", mlp="post_feedforward_layernorm")
_SANDWICH = replace(_POST_NORM, mid="pre_feedforward_layernorm", pair=True)
_GPT2 = Layout("transformer.h", "transformer.wte", "transformer.ln_f", "attn", mid="ln_2", pos_embed="transformer.wpe")
_BLOOM = Layout("transformer.h", "transformer.word_embeddings", "transformer.ln_f", "self_attention")


def _granite(config: Any) -> Layout:
    return replace(_PLAIN, multiplier=config.residual_multiplier)


def _granite_moe(config: Any) -> Layout:
    return replace(_granite(config), mlp="block_sparse_moe", router="block_sparse_moe.gate")


def _granite_moe_shared(config: Any) -> Layout:
    return replace(_granite_moe(config), absent=_ADDED_BY_LAYER if config.shared_intermediate_size else {})


def _hyperclovax(config: Any) -> Layout:
    layout = _granite(config)
    return replace(layout, attn="post_norm1", mlp="post_norm2") if config.use_post_norm else layout


def _gpt_neox(config: Any) -> Layout:
    parts = ("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "attention")
    return Layout(*parts, absent=_PARALLEL if config.use_parallel_residual else {})


def _falcon(config: Any) -> Layout:
    parallel = config.new_decoder_architecture or config.parallel_attn
    return replace(_BLOOM, biased=True, absent=_PARALLEL if parallel else {})


def _bloom(config: Any) -> Layout:
    return replace(_BLOOM, absent=_NORMED_STREAM if config.apply_residual_connection_post_layernorm else {})


def _opt(config: Any) -> Layout:
    absent = dict({} if config.do_layer_norm_before else _NORMED_STREAM)
    if not config.do_layer_norm_before or getattr(config, "_remove_final_layer_norm", False):
        absent |= _NO_NORM
    trunk = "model.decoder"
    return Layout(
        f"{trunk}.layers",
        f"{trunk}.embed_tokens",
        f"{trunk}.final_layer_norm",
        mlp="fc2",
        mid="self_attn_layer_norm" if absent else "final_layer_norm",
        pos_embed=f"{trunk}.embed_positions",
        absent=absent,
    )


Row = Layout | Callable[[Any], Layout]

VLLM_MODELS: dict[str, Row] = {
    "ApertusForCausalLM": replace(_LLAMA, mid="feedforward_layernorm"),
    "ArceeForCausalLM": _LLAMA,
    "BloomForCausalLM": _bloom,
    "CohereForCausalLM": replace(_PLAIN, absent=_PARALLEL),
    "Ernie4_5ForCausalLM": _LLAMA,
    "Ernie4_5_MoeForCausalLM": replace(_LLAMA, router="mlp.gate"),
    "Exaone4ForCausalLM": _POST_NORM,
    "FalconForCausalLM": _falcon,
    "FlexOlmoForCausalLM": replace(_POST_NORM, router="mlp.gate"),
    "GPT2LMHeadModel": _GPT2,
    "GPTJForCausalLM": replace(_GPT2, pos_embed="", absent=_PARALLEL),
    "GPTNeoXForCausalLM": _gpt_neox,
    "GemmaForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _SANDWICH,
    "Gemma3ForCausalLM": _SANDWICH,
    "GlmForCausalLM": _LLAMA,
    "Glm4ForCausalLM": replace(_LLAMA, attn="post_self_attn_layernorm", mlp="post_mlp_layernorm"),
    "Glm4MoeForCausalLM": replace(_LLAMA, router="mlp.gate"),
    "GraniteForCausalLM": _granite,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeSharedForCausalLM": _granite_moe_shared,
    "HunYuanDenseV1ForCausalLM": _LLAMA,
    "HunYuanMoEV1ForCausalLM": replace(_LLAMA, router="mlp.gate"),
    "HyperCLOVAXForCausalLM": _hyperclovax,
    "Jais2ForCausalLM": replace(_LLAMA, absent=_SUMMED_TWICE),
    "LlamaForCausalLM": _LLAMA,
    "MPTForCausalLM": Layout(
        "transformer.blocks", "transformer.wte", "transformer.norm_f", "attn", mlp="ffn", mid="norm_2"
    ),
    "MellumForCausalLM": replace(_LLAMA, router="mlp.experts.gate"),
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": replace(_LLAMA, mlp="block_sparse_moe", router="block_sparse_moe.gate"),
    "NemotronForCausalLM": _LLAMA,
    "Olmo3ForCausalLM": _POST_NORM,
    "OlmoeForCausalLM": replace(_LLAMA, router="mlp.gate"),
    "OPTForCausalLM": _opt,
    "PhiForCausalLM": replace(_PLAIN, norm="model.final_layernorm", absent=_PARALLEL),
    "Phi3ForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen2MoeForCausalLM": replace(_LLAMA, router="mlp.gate"),
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": replace(_LLAMA, router="mlp.experts.gate"),
    "SeedOssForCausalLM": _LLAMA,
    "StablelmForCausalLM": _PLAIN,
}

TRANSFORMERS_TRUNKS: dict[str, Row] = {
    "GPTBigCodeModel": Layout("model.h", "model.wte", "model.ln_f", "attn", mid="ln_2", pos_embed="model.wpe"),
    "HeliumModel": _PLAIN,
    "OlmoModel": _PLAIN,
    "Olmo2Model": _POST_NORM,
    "SmolLM3Model": _PLAIN,
    "Starcoder2Model": _PLAIN,
    "VaultGemmaModel": replace(_PLAIN, mid="pre_feedforward_layernorm"),
}
