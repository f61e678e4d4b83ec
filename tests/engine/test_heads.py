"""Attention by head on a running engine: all that a kernel can do to scores, caches of 8 bits, steps, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import insitu
from insitu.run.attention import Kept
from tests.engine.helpers import PROMPT, assert_close, hf, ids_of, own_engine
from tests.models import LAYERS

TOKENS = 40
LONG = torch.randint(5, 400, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = {"temperature": 0.0, "ignore_eos": True}
RANDOM = torch.Generator().manual_seed(1)


def attention(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn.attn


def steps(model: Any, prompt: Any, count: int, kept: Any = torch.Tensor.float) -> list[torch.Tensor]:
    """By layer, how far pattern times values is from what attention returns, in all steps; and the patterns."""

    def block(tracer: Any) -> list[list[tuple[torch.Tensor, ...]]]:
        found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(LAYERS)]
        for _ in tracer.iter[:]:
            for i in range(LAYERS):
                pattern, v = model.attn_pattern[i], model.v[i]
                found[i].append((pattern, v, attention(model, i).output))
        return found

    patterns = []
    for layer in model.run(block, prompt, max_tokens=count, **GREEDY):
        values = torch.cat([kept(v) for _, v, _ in layer])
        for pattern, _, returned in layer:
            seen = values[: pattern.shape[-1]].repeat_interleave(len(pattern) // values.shape[1], 1)
            computed = torch.einsum("hqk,khd->qhd", pattern, seen).flatten(1)
            bound = 1e-5 if returned.dtype == torch.float32 else 2 * torch.finfo(returned.dtype).eps
            assert_close(computed, returned.float(), bound=bound)
            patterns.append(pattern)
    return patterns


@contextmanager
def kernel(model: Any, **settings: Any) -> Iterator[None]:
    """vLLM's own kernel with other settings, which no tiny model has."""
    worker = model.vllm_entrypoint.llm_engine.model_executor.driver_worker.worker
    impls = [module.impl for module in worker.get_model().modules() if type(module).__name__ == "Attention"]
    known = worker.insitu_host.interleaver.anatomy._streams  # with what kernels were when first asked
    before = [{name: getattr(impl, name) for name in settings} for impl in impls]
    try:
        for impl in impls:
            vars(impl).update(settings)
        known.clear()
        yield
    finally:
        known.clear()
        for impl, own in zip(impls, before, strict=True):
            vars(impl).update(own)


@pytest.mark.in_process
@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 8},
        {"sliding_window": 1},
        {"logits_soft_cap": 1.5},
        {"scale": 0.03},
        {"alibi_slopes": torch.linspace(0.1, 1, 4)},
        {"sinks": 9 + torch.randn(4, generator=RANDOM).bfloat16()},
        {"sinks": 9 + torch.randn(4, generator=RANDOM).bfloat16(), "sliding_window": 5, "logits_soft_cap": 2.0},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_the_pattern_is_that_of_the_kernel(llama: Any, settings: dict[str, Any]) -> None:
    plain = steps(llama, LONG, 3)
    with kernel(llama, **settings):
        patterns = steps(llama, LONG, 3)
    assert not all(a.allclose(b) for a, b in zip(patterns, plain, strict=True))
    for pattern in patterns:
        sums = pattern.sum(-1)
        assert (sums < 1 + 1e-5).all()
        assert (sums < 0.9).any() if "sinks" in settings else (sums > 1 - 1e-5).all()
        if "sliding_window" in settings:
            assert ((pattern > 0).sum(-1) <= settings["sliding_window"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cache", "kept"),
    [
        ("float32", "fp8", Kept(torch.float8_e4m3fn, toward_zero=True)),
        ("float32", "fp8_e5m2", Kept(torch.float8_e5m2, toward_zero=True)),
        ("bfloat16", "fp8", Kept(torch.float8_e4m3fn, toward_zero=True)),
        ("bfloat16", "auto", torch.Tensor.float),
    ],
)
def test_the_pattern_is_that_of_the_keys_in_the_cache(engines: Any, dtype: str, cache: str, kept: Any) -> None:
    with own_engine(engines, "llama", dtype=dtype, kv_cache_dtype=cache) as model:
        assert all(pattern.dtype == torch.float32 for pattern in steps(model, LONG, 3, kept))


@pytest.mark.slow
def test_in_compiled_engines_too(engines: Any) -> None:
    with own_engine(engines, "llama", enforce_eager=False) as model:
        steps(model, LONG, 3)
        before = model.stats().eager_steps
        with model.trace(PROMPT, max_tokens=6, **GREEDY):
            pattern = model.attn_pattern[1].save()
        assert pattern.shape[1] == len(ids_of("llama"))
        assert model.stats().eager_steps == before + 1, "keys are recorded only for blocks that get to later steps"


@pytest.mark.slow
def test_heads_can_be_tapped(engines: Any, llama: Any) -> None:
    def block(model: Any) -> Any:
        def run(tracer: Any) -> list[torch.Tensor]:
            seen = []
            for _ in tracer.iter[:]:
                model.q[1][:, 0] *= 2
                seen += [model.attn_pattern[1], model.k[1], model.logits]
            return seen

        return run

    wanted = llama.run(block(llama), PROMPT, max_tokens=4, **GREEDY)
    with own_engine(engines, "llama", enforce_eager=False, taps=["q"]) as model:
        for _ in range(3):  # how a step runs is learnt
            for mine, its in zip(model.run(block(model), PROMPT, max_tokens=4, **GREEDY), wanted, strict=True):
                assert_close(mine, its)
        assert model.stats().tapped_steps >= 4


def test_all_of_one_layer_can_be_read_in_any_order(llama: Any) -> None:
    with llama.trace(PROMPT, **GREEDY, max_tokens=1):
        v = llama.v[1].save()
        pattern = llama.attn_pattern[1].save()
        k = llama.k[1].save()
        again = llama.attn_pattern(1).save()
        q = llama.q[-3].save()
        inputs = attention(llama, 1).inputs.save()
        added = llama.attn_out[1].save()
    assert again.equal(pattern)
    assert q.flatten(1).equal(inputs[0][0])
    assert k.flatten(1).equal(inputs[0][1])
    assert v.flatten(1).equal(inputs[0][2])
    assert_close(added, hf("llama", ids_of("llama"))["model.layers.1.self_attn"].output[0])
    with pytest.raises(insitu.OutOfOrderError, match=r"`model.layers.1.self_attn.attn.input` has gone by"):
        llama.run(lambda tracer: [llama.attn_out[1], llama.q[1]], PROMPT, max_tokens=1)


def test_the_pattern_is_of_q_and_k_as_they_are(llama: Any) -> None:
    with llama.trace(PROMPT, **GREEDY, max_tokens=1):
        before = llama.attn_pattern[1].save()
        llama.q[1][:, 2] = 0
        after = llama.attn_pattern[1].save()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            exact = llama.attn_pattern[1].save()
    uniform = torch.ones(before.shape[1:]).tril()
    torch.testing.assert_close(after[2], uniform / uniform.sum(-1, keepdim=True))
    assert after[[0, 1, 3]].equal(before[[0, 1, 3]])
    assert exact.equal(after)


def test_what_is_held_is_not_changed_by_a_later_write(llama: Any) -> None:
    with llama.trace(PROMPT, **GREEDY, max_tokens=1):
        kept = llama.v[0].clone().save()
        llama.v[0] = torch.zeros_like(llama.v[0])
        written = llama.v[0].save()
        returned = attention(llama, 0).output.save()
        other = llama.v[1].save()
    assert kept.any()
    assert not written.any()
    assert not returned.any()
    assert other.any()
    with pytest.raises(
        insitu.WriteError, match=r"model.k\[0\] takes shape \(\d+, 2, 32\) torch.float32; got shape \(1, 2\)"
    ):
        with llama.trace(PROMPT, max_tokens=1):
            llama.k[0] = torch.zeros(1, 2)


def test_each_request_has_its_own_keys(llama: Any) -> None:
    prompts = [LONG, ids_of("llama"), LONG[:3]]

    def block(tracer: Any) -> list[torch.Tensor]:
        return [llama.attn_pattern[i].clone() for _ in tracer.iter[:] for i in range(LAYERS)]

    company = llama.run(block, prompts, max_tokens=4, **GREEDY)
    for prompt, seen in zip(prompts, company, strict=True):
        alone = llama.run(block, prompt, max_tokens=4, **GREEDY)
        for mine, its in zip(alone, seen, strict=True):
            assert_close(its, mine)
    assert llama.in_flight() == 0


def test_a_helper_may_read_the_pattern_of_a_later_step(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        seen = [].save()
        for step in tracer.iter[[0, 3]]:
            seen.append(read_pattern(llama, step))
    length = len(ids_of("llama"))
    assert [tuple(each.shape) for each in seen] == [(4, length, length), (4, 1, length + 3)]


def read_pattern(model: Any, step: int) -> torch.Tensor:
    return model.attn_pattern[2] if step == 3 else model.attn_pattern(2)


def test_without_recorded_keys_a_later_pattern_is_refused(llama: Any) -> None:
    def hidden(tracer: Any) -> Any:
        return [getattr(llama, "attn_" + "pattern")[1] for _ in tracer.iter[:2]]

    with pytest.raises(insitu.LocationError, match=r"`model.attn_pattern\[1\]` of step 1 needs the keys .* write them"):
        llama.run(hidden, PROMPT, max_tokens=3, **GREEDY)

    def skips(tracer: Any) -> Any:
        for step in tracer.iter[:2]:
            layer = llama.model.layers[1]
            if step == 0:
                layer.skip((llama.resid_pre[1].clone(), torch.zeros_like(llama.resid_pre[1])))
            else:
                llama.attn_pattern[1].sum()

    with pytest.raises(
        insitu.LocationError, match=r"those of step 0 were not given to `model.layers.1.self_attn.attn`"
    ):
        llama.run(skips, PROMPT, max_tokens=3, **GREEDY)


def test_sequences_of_one_prompt_each_have_their_own(llama: Any) -> None:
    with llama.trace(PROMPT, n=2, temperature=1.0, seed=3, max_tokens=3, ignore_eos=True) as tracer:
        shapes = [].save()
        for _ in tracer.iter[:]:
            shapes.append(tuple(llama.attn_pattern[0].shape))
    length = len(ids_of("llama"))
    assert shapes == [[(4, length, length), (4, 1, length + 1), (4, 1, length + 2)]] * 2


def test_a_pattern_edited_after_its_place_is_the_blocks_own(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1, **GREEDY):
        pattern = llama.attn_pattern[0]
        llama.attn_out[0].sum()
        pattern[:, :, 0] = 0
        kept = pattern.save()
    assert not kept[:, :, 0].any()
    with pytest.raises(insitu.WriteError, match=r"editing it changes nothing.*clone them first"):
        with llama.trace(PROMPT, max_tokens=1, **GREEDY):
            llama.attn_pattern[0][:, :, 0] = 0
