"""Attention modules by their attributes: which are refused, and why; scores by hand; rows on other axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from insitu import LocationError
from insitu.run import Rows
from insitu.run.anatomy import Anatomy
from insitu.run.attention import Kept, Kernel, kernel_of
from insitu.run.modules import ModuleTable


def impl(kind: str = "CPUAttentionBackendImpl", **settings: Any) -> Any:
    given = {"scale": 0.5, "sliding_window": -1, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
    return type(kind, (SimpleNamespace,), {})(**{**given, **settings})


def module(kind: str = "Attention", its: Any = None, **settings: Any) -> Any:
    made = type(kind, (nn.Module,), {"forward": lambda self, query, key, value: value})()
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "attn_type": "decoder", "kv_cache": torch.empty(0)}
    for name, value in {**given, "impl": its or impl(), **settings}.items():
        setattr(made, name, value)
    return made


def model(*attention: Any, kind: str = "LlamaForCausalLM") -> Anatomy:
    """A model of one layer with these attention modules in it."""
    root, layer = type(kind, (nn.Module,), {})(), nn.Module()
    root.config = SimpleNamespace()
    root.model = nn.Module()
    root.model.layers = nn.ModuleList([layer])
    for number, each in enumerate(attention):
        layer.add_module(f"attn{number or ''}", each)
    return Anatomy(ModuleTable(root))


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (module("MLAAttention", kv_lora_rank=64), r"MLAAttention, which keeps no keys by head \(latent attention\)"),
        (module(kv_sharing_target_layer_name="model.layers.0.attn"), "attends to the keys and values of `model.layers"),
    ],
)
def test_attention_without_keys_of_its_own_is_refused_by_name(attention: Any, why: str) -> None:
    for name in ("q", "k", "v", "attn_pattern"):
        with pytest.raises(LocationError, match=rf"`model.{name}\[0\]` .*{why}"):
            model(attention).stream(name, 0)


def test_there_must_be_one_in_the_layer() -> None:
    with pytest.raises(LocationError, match=r"`model.layers.0` of LlamaForCausalLM has no attention module"):
        model().stream("q", 0)
    with pytest.raises(LocationError, match=r"has 2 attention modules \(model.layers.0.attn, model.layers.0.attn1\)"):
        model(module(), module()).stream("q", 0)
    with pytest.raises(LocationError, match="not known for StrangeForCausalLM"):
        model(module(), kind="StrangeForCausalLM").stream("q", 0)
    assert [heads.place.path for heads in model(module()).keys] == ["model.layers.0.attn"]
    assert model(module(), module()).keys == []


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (module("ChunkedLocalAttention"), "ChunkedLocalAttention computes its weights"),
        (module("CrossAttention", attn_type="encoder_decoder"), "CrossAttention"),
        (module(its=impl("TurboQuantImpl")), "TurboQuantImpl computes its weights"),
        (module(its=impl("TritonAttentionImpl", use_alibi_sqrt=True)), "use_alibi_sqrt"),
        (module(its=impl("TritonAttentionImpl", chunk_lookback=1)), "not causally"),
        (module(attn_type="encoder_only"), "not causally"),
        (module(use_mm_prefix=True), "use_mm_prefix"),
        (module(calculate_kv_scales=True), "calculate_kv_scales"),
        (module(kv_cache_dtype="int8_per_token_head"), "KV cache of int8_per_token_head"),
        (module(kv_cache_dtype="fp8", _k_scale=torch.ones(2)), "a scale for each head"),
        (module(its=impl(alibi_slopes=torch.ones(4), logits_soft_cap=2.0)), "caps scores that have ALiBi"),
    ],
)
def test_what_is_not_known_of_a_kernel_refuses_the_pattern_alone(attention: Any, why: str) -> None:
    anatomy = model(attention)
    with pytest.raises(LocationError, match=rf"`model.attn_pattern\[0\]` is not known here: .*{why}.*Read model.q"):
        anatomy.stream("attn_pattern", 0)
    assert anatomy.stream("q", 0).place.path == "model.layers.0.attn"


@pytest.mark.parametrize(
    ("kept", "window"), [(-1, None), (None, None), (0, None), (8, 8), ((-1, -1), None), ((7, 0), 8)]
)
def test_windows_are_kept_in_two_forms(kept: Any, window: int | None) -> None:
    assert kernel_of(module(its=impl("FlashAttentionImpl", sliding_window=kept)), "").window == window


def test_scores_as_written_out_by_hand() -> None:
    q, k = torch.randn(2, 4, 8), torch.randn(5, 2, 8)
    slopes, sinks = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([-1.0, 0.0, 1.0, 9.0])
    kernel = Kernel(0.5, window=3, slopes=slopes, sinks=sinks)
    capped = Kernel(0.5, cap=2.0)
    found, found_capped = kernel.pattern(q, k), capped.pattern(q, k)
    for head in range(4):
        for query in range(2):
            at = 3 + query
            scores = [float(q[query, head] @ k[key, head // 2]) * 0.5 for key in range(at + 1)]
            biased = torch.tensor([score - float(slopes[head]) * (at - key) for key, score in enumerate(scores)])
            weights = torch.cat([biased[-3:], sinks[head : head + 1]]).softmax(0)[:-1]
            torch.testing.assert_close(found[head, query, at - 2 : at + 1], weights)
            assert not found[head, query, : at - 2].any()
            assert not found[head, query, at + 1 :].any()
            wanted = (2 * (torch.tensor(scores) / 2).tanh()).softmax(0)
            torch.testing.assert_close(found_capped[head, query, : at + 1], wanted)


def test_keys_are_rounded_as_the_cache_keeps_them() -> None:
    value = torch.tensor([1.07, -1.07, 0.0, 500.0, -0.0015, 1e-9])
    nearest, to_zero = Kept(torch.float8_e4m3fn), Kept(torch.float8_e4m3fn, toward_zero=True)
    assert nearest(value)[:4].tolist() == [1.125, -1.125, 0.0, 448.0]
    assert to_zero(value)[:4].tolist() == [1.0, -1.0, 0.0, 448.0]
    assert to_zero(value)[4:].tolist() == [0.0, 0.0]
    assert Kept(torch.float8_e4m3fn, scale=2.0)(torch.tensor([900.0])).item() == 896.0
    assert Kept(torch.bfloat16)(torch.tensor([1.001])).item() == 1.0


def test_tokens_may_come_after_heads_where_there_is_a_batch_axis() -> None:
    rows = Rows(1, 3, 5, batched=True)
    by_heads = torch.arange(40.0).reshape(1, 4, 5, 2)
    assert by_heads[rows.of(by_heads)].equal(by_heads[0, :, 1:3])
    by_tokens = by_heads.transpose(1, 2)
    assert by_tokens[rows.of(by_tokens)].equal(by_tokens[0, 1:3])
    assert rows.of(torch.zeros(1, 4, 2)) is None
    assert Rows(1, 3, 5).of(by_heads) is None
    either = torch.zeros(1, 5, 5, 2)
    with pytest.raises(LocationError, match="can't be told whether its tokens are on axis 1 or 2"):
        rows.of(either)
    assert either[Rows(0, 5, 5, batched=True).of(either)].shape == (5, 5, 2)
