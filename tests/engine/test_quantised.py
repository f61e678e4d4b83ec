"""Engines with quantised weights or an 8-bit KV cache: blocks see and write the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import insitu
from tests.engine.helpers import PROMPT, assert_close, difference, hf_stream, ids_of, own_engine, plain
from tests.engine.quantised import Tensors, quantised
from tests.models import HEADS, KV_HEADS, LAYERS, WIDTH

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

# Of each kind: the dtype that the CPU build computes it in, and how close that comes to plain torch.
KINDS = {"int8": ("float32", 2e-5), "four bits": ("bfloat16", 1e-2), "awq": ("bfloat16", 1e-2)}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Tensors]]:
    folder = tmp_path_factory.mktemp("quantised")
    meant = quantised(kind, folder)
    settings = {"dtype": KINDS[kind][0], "enforce_eager": True, "max_model_len": 256}
    with insitu.VLLM(str(folder), dispatch=True, **settings) as model:
        yield model, meant


def by_tokens(rows: torch.Tensor) -> torch.Tensor:
    """Rows rounded to 8 bits each, as the int8 kernels do it."""
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round() * scale


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    assert value.shape == wanted.shape
    return ((value.float() - wanted).norm() / wanted.norm()).item()


def linears(model: Any) -> dict[str, Any]:
    return {
        f"model.layers.{layer}.{path}": model.get(f"model.layers.{layer}.{path}")
        for layer in range(LAYERS)
        for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }


def test_values_are_those_of_the_weights_meant(built: Any, kind: str) -> None:
    model, meant = built
    dtype, bound = KINDS[kind]
    with model.trace(ids_of("llama"), max_tokens=1):
        found = {}.save()
        for path, node in linears(model).items():
            given = node.input
            found[path] = given, node.output[0]
    for path, (given, returned) in found.items():
        parent, _, name = path.rpartition(".")
        weight = torch.cat([meant[f"{parent}.{part}"] for part in FUSED.get(name, (name,))])
        assert given.dtype == returned.dtype == getattr(torch, dtype)
        rows = by_tokens(given) if kind == "int8" else given.float()
        assert relative(returned, rows @ weight.T) <= bound, path


def test_edits_and_names_in_a_quantised_engine(built: Any, kind: str) -> None:
    model, _ = built
    with model.trace(PROMPT, max_tokens=1):
        before = model.resid_mid[1]
        mlp = model.mlp_out[1]
        after = model.resid_post[1].save()
        total = (before + mlp).save()
        logits = model.logits.save()
    assert relative(after, total.float()) <= KINDS[kind][1]
    with model.trace(PROMPT, max_tokens=1):
        model.model.layers[1].mlp.gate_up_proj.output[0][:] = 0.5
        value = model.model.layers[1].mlp.act_fn.output.save()
        edited = model.logits.save()
    assert value.unique().tolist() == [(torch.nn.functional.silu(torch.tensor(0.5)) * 0.5).to(value.dtype).item()]
    assert not torch.equal(edited, logits)
    with model.trace(PROMPT, max_tokens=1):
        model.model.layers[1].mlp.skip(mlp_of_ones(model, value))
        skipped = model.mlp_out[1].save()
    assert torch.equal(skipped, torch.ones_like(skipped))


def mlp_of_ones(model: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(like), WIDTH, dtype=like.dtype)


def test_a_block_calls_quantised_modules(built: Any) -> None:
    model, _ = built
    with model.trace(PROMPT, max_tokens=1):
        down = model.model.layers[1].mlp.down_proj
        called = down(down.input)[0].save()
        returned = down.output[0].save()
    assert difference(called.float(), returned.float()) <= 1e-6


def test_the_check_of_a_quantised_engine(built: Any, kind: str) -> None:
    """Transformers rounds 8-bit activations in another way than vLLM, and has not all that AWQ needs."""
    report = built[0].check(reference=kind == "four bits", show=False)
    assert report.passed, report.failed
    assert {row.check for row in report.rows} >= {"sum", "company", "values"}


# -- an 8-bit KV cache ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def cached(engines: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, torch.dtype]]:
    kept = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[request.param]
    with own_engine(engines, "llama", kv_cache_dtype=request.param) as model:
        yield model, kept


def in_cache(values: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """As vLLM's CPU kernels keep values in 8 bits: rounded towards zero."""
    nearest = values.to(kept)
    too_large = nearest.float().abs() > values.abs()
    return (nearest.view(torch.uint8) - too_large.to(torch.uint8)).view(kept).float()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """Causal attention of flat rows, with keys and values as the cache keeps them."""
    head = WIDTH // HEADS

    def heads(rows: torch.Tensor, times: int) -> torch.Tensor:
        return rows.unflatten(-1, (-1, head)).transpose(0, 1).repeat_interleave(times, 0)

    key, value = (heads(in_cache(rows, kept), HEADS // KV_HEADS) for rows in (key, value))
    query = heads(query, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(0, 1).flatten(1)


def test_values_with_an_8_bit_cache(cached: Any) -> None:
    model, kept = cached
    ids = ids_of("llama")
    with model.trace(ids, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        into = [].save()
        out = [].save()
        for _ in tracer.iter[:]:
            attn = model.model.layers[1].self_attn.attn
            into.append(attn.inputs[0][:3])
            out.append(attn.output)
        result = tracer.result.save()
    query, key, value = (torch.cat(rows) for rows in zip(*into, strict=True))
    assert_close(torch.cat(out), attention(query, key, value, kept))
    (untraced,) = plain(model, [ids], max_tokens=4, ignore_eos=True)
    assert list(result.outputs[0].token_ids) == list(untraced.outputs[0].token_ids)


def test_edits_of_what_an_8_bit_cache_keeps(cached: Any) -> None:
    model, kept = cached
    with model.trace(ids_of("llama"), temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        attn = model.model.layers[1].self_attn.attn
        query, key, value = attn.inputs[0][:3]
        value[:] = 1.3
        first = attn.output.save()
        tracer.next()
        later = attn.inputs[0][2].save()
        second = attn.output.save()
    rounded = in_cache(torch.tensor(1.3), kept)
    assert_close(first, rounded.expand(first.shape))
    assert later.shape == (1, WIDTH // HEADS * KV_HEADS)
    assert second.shape == (1, WIDTH)
    mixed = second.unflatten(-1, (HEADS, -1)) - rounded
    new = in_cache(later, kept).unflatten(-1, (KV_HEADS, -1)).repeat_interleave(HEADS // KV_HEADS, 1) - rounded
    share = (mixed * new).sum(-1) / (new * new).sum(-1)
    assert ((share >= -1e-4) & (share <= 1 + 1e-4)).all(), "a mean of the edited values and the new one"
    assert_close(mixed, share[..., None] * new, bound=1e-4)


def test_the_stream_before_any_cache_is_that_of_a_full_one(cached: Any) -> None:
    model, _ = cached
    with model.trace(ids_of("llama"), max_tokens=1):
        first = model.resid_pre[0].save()
    assert_close(first, hf_stream("llama", ids_of("llama")).resid_pre[0])
