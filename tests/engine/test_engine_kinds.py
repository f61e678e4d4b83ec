"""Engines of other kinds than the float32, eager one: compiled, bfloat16, with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.helpers import (
    PROMPT,
    assert_close,
    assert_greedy,
    hf,
    hf_edited,
    hf_stream,
    ids_of,
    own_engine,
    plain,
)
from tests.models import LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.in_process]  # an engine for nearly every test


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def compiled(engines: Any) -> Iterator[Any]:
    with own_engine(engines, "llama", enforce_eager=False, max_num_seqs=4) as model:
        assert model.vllm_entrypoint.llm_engine.vllm_config.compilation_config.mode != 0
        yield model


def test_values_and_edits_in_a_compiled_engine(compiled: Any) -> None:
    ids, stream = ids_of("llama"), hf_stream("llama", ids_of("llama"))
    (before,) = plain(compiled, [ids], max_tokens=6, ignore_eos=True)
    with compiled.trace(ids, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        embed = compiled.embed.save()
        into = compiled.model.layers[1].self_attn.qkv_proj.input.save()
        resid = [compiled.resid_post[layer] for layer in range(1, LAYERS)].save()
        trunk = compiled.model.output.save()
        logits = compiled.logits.save()
        result = tracer.result.save()
    assert_close(embed, stream.embed)
    assert_close(into, hf("llama", ids)["model.layers.1.self_attn.q_proj"].input)
    for layer, value in enumerate(resid, start=1):
        assert_close(value, stream.resid_post[layer], f"layer {layer}")
    assert_close(trunk, stream.final_norm)
    assert_close(logits, stream.logits[-1:])
    assert tokens_of(result) == tokens_of(before)
    with compiled.trace(ids, max_tokens=1):
        compiled.resid_post[1][:] *= 2
        logits = compiled.logits.save()
    wanted = hf_edited("llama", ids, {"model.layers.1": lambda x: x * 2})
    assert_close(logits, wanted[""].output["logits"][-1:])
    (after,) = plain(compiled, [ids], max_tokens=6, ignore_eos=True)
    assert tokens_of(after) == tokens_of(before)


def test_only_steps_that_a_block_waits_in_leave_the_compiled_path(compiled: Any) -> None:
    before = compiled.stats()
    with compiled.trace(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
        compiled.resid_post[3]
        later = [].save()
        for _ in tracer.iter[5:6]:
            later.append(compiled.resid_post[3])
        result = tracer.result.save()
    after = compiled.stats()
    assert after.eager_steps - before.eager_steps == 2
    assert after.plain_steps - before.plain_steps == 6
    drawn = tokens_of(result)
    assert_close(later[0], hf_stream("llama", [*ids_of("llama"), *drawn[:5]]).resid_post[3][-1:])
    assert_greedy("llama", ids_of("llama"), drawn)


def test_a_bfloat16_engine_gives_and_takes_bfloat16(engines: Any) -> None:
    stream = hf_stream("llama", ids_of("llama"))
    with own_engine(engines, "llama", dtype="bfloat16") as model:
        with model.trace(PROMPT, max_tokens=1):
            mlp = model.model.layers[1].mlp
            mixed = mlp.output.save()
            mlp.output = torch.ones_like(mlp.output, dtype=torch.float32) / 3
            written = mlp.output.save()
            resid = model.resid_post[3].save()
        with model.trace(PROMPT, max_tokens=1):
            logits = model.logits.save()
    assert {mixed.dtype, written.dtype, resid.dtype} == {torch.bfloat16}
    assert written.unique().tolist() == [torch.tensor(1 / 3, dtype=torch.bfloat16).item()]
    assert_close(mixed.float(), stream.mlp_out[1], bound=0.1)
    assert_close(logits.float(), stream.logits[-1:], bound=0.1)


def test_an_engine_with_experts_after_one_without(llama: Any, engines: Any) -> None:
    """vLLM makes its process groups with the first engine of a process, for experts only if that has some."""
    ids = ids_of("mixtral")
    with own_engine(engines, "mixtral") as model:
        resid = model.run(lambda tracer: model.resid_post[3], ids, max_tokens=1)
    assert_close(resid, hf_stream("mixtral", ids).resid_post[3])
    assert_close(llama.run(lambda tracer: llama.logits, ids, max_tokens=1), hf_stream("llama", ids).logits[-1:])
