"""Operations inside vLLM's forwards against what transformers computes there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from insitu.block import LocationError, NotReachedError, OutOfOrderError, UnknownModuleError, WriteError
from tests.engine.helpers import PROMPT, assert_close, hf, hf_edited, hf_stream, ids_of, layers, plain, watched_modules
from tests.models import HEADS, KV_HEADS, LAYERS, WIDTH

OTHER = "Water boils at one hundred degrees"
HEAD = WIDTH // HEADS


def activation(mlp: Any) -> str:
    """The operation of Llama's feed-forward that is its activation: vLLM 0.32 calls a function around it."""
    (name,) = {*dir(mlp.source)} - {"self_gate_up_proj_0", "self_down_proj_0"}
    return name


def last_logits(seen: Any) -> torch.Tensor:
    return seen[""].output["logits"][-1:]


# Listing.


def test_the_client_lists_the_operations_of_a_forward(llama: Any) -> None:
    mlp = llama.model.layers[3].mlp
    shown = repr(mlp.source)
    assert shown.splitlines()[0] == "LlamaMLP.forward"
    assert re.search(r"\n\d+ +x, _ = self\.down_proj\(x\) +# self_down_proj_0\n", shown)
    assert dir(mlp.source) == sorted([activation(mlp), "self_down_proj_0", "self_gate_up_proj_0"])
    assert "# self_forward_native_0" in repr(mlp.act_fn.source.self__forward_method_0.source)


def test_the_block_lists_them_too(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        shown = repr(llama.model.layers[3].mlp.source).save()
        names = [str(operation) for operation in llama.model.layers[3].mlp.source].save()
    assert shown == repr(llama.model.layers[3].mlp.source)
    assert names[0] == "<operation model.layers.3.mlp.source.self_gate_up_proj_0>"


def test_an_unknown_operation_names_the_nearest(llama: Any) -> None:
    text = (
        r"`model\.layers\.3\.mlp\.source` \(LlamaMLP\.forward\) has no operation `self_down_0`; "
        r"the nearest is `self_down_proj_0`"
    )
    with pytest.raises(UnknownModuleError, match=text):
        llama.model.layers[3].mlp.source.self_down_0
    with pytest.raises(UnknownModuleError, match=text):
        with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
            seen = llama.model.layers[3].mlp.source.self_down_0.output.save()
    assert llama.in_flight() == 0


def test_what_has_no_operations_says_why(llama: Any) -> None:
    with pytest.raises(
        LocationError, match=r"down_proj_0` calls a module \(RowParallelLinear\): .*`model\.layers\.3\.mlp\.down_proj"
    ):
        print(llama.model.layers[3].mlp.source.self_down_proj_0.source)
    with pytest.raises(LocationError, match=r"qkv_split_0` calls can be told only while it runs"):
        print(llama.model.layers[3].self_attn.source.qkv_split_0.source)


# Reading.


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_gpt2_s_additions_are_the_residual_stream(gpt2: Any, layer: int) -> None:
    stream = hf_stream("gpt2", ids_of("gpt2"))
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        block = gpt2.transformer.h[layer]
        attn = block.source.self_attn_0.output.save()
        summands = block.source.add_0.inputs[0].save()
        mid = block.source.add_0.output.save()
        mlp = block.source.self_mlp_0.output.save()
        post = block.source.add_1.output.save()
    assert_close(attn, stream.attn_out[layer])
    assert_close(summands[0], stream.attn_out[layer])
    assert_close(summands[1], stream.resid_pre[layer])
    assert_close(mid, stream.resid_mid[layer])
    assert_close(mlp, stream.mlp_out[layer])
    assert_close(post, stream.resid_post[layer])


def test_gpt2_s_queries_keys_and_values(gpt2: Any) -> None:
    wanted = hf("gpt2", ids_of("gpt2"))["transformer.h.1.attn.c_attn"].output
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        chunk = gpt2.transformer.h[1].attn.source.qkv_chunk_0
        joined = chunk.input.save()
        parts = chunk.output.save()
    assert_close(joined, wanted)
    for part, expected in zip(parts, wanted.split(WIDTH, -1), strict=True):
        assert_close(part, expected)


def test_llama_s_queries_keys_and_values(llama: Any) -> None:
    seen = hf("llama", ids_of("llama"))
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        attention = llama.model.layers[1].self_attn
        parts = attention.source.qkv_split_0.output.save()
        rotated = attention.source.self_rotary_emb_0.output.save()
        given = attention.source.self_attn_0.inputs[0].save()
        mixed = attention.source.self_attn_0.output.save()
    assert [part.shape[1] for part in parts] == [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
    for name, value in zip("qkv", parts, strict=True):
        assert_close(value, seen[f"model.layers.1.self_attn.{name}_proj"].output, name)
    assert torch.equal(given[0], rotated[0])
    assert torch.equal(given[2], parts[2])
    assert_close(mixed, seen["model.layers.1.self_attn.o_proj"].input)


def test_an_operation_two_functions_down(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        native = llama.model.layers[2].mlp.act_fn.source.self__forward_method_0.source.self_forward_native_0
        joined = native.input.save()
        product = native.source.mul_0.output.save()
        output = native.output.save()
    gate, up = joined.chunk(2, -1)
    assert_close(torch.nn.functional.silu(gate) * up, product)
    assert torch.equal(product, output)
    assert_close(output, hf("llama", ids_of("llama"))["model.layers.2.mlp.down_proj"].input)


def test_a_loop_over_the_layers(llama: Any) -> None:
    stream = hf_stream("llama", ids_of("llama"))
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        outputs = [].save()
        for _ in range(LAYERS):
            llama.model.source.layer_0.inputs
            outputs.append(llama.model.source.layer_0.output)
    for (hidden, residual), wanted in zip(outputs, stream.resid_post, strict=True):
        assert_close(hidden + residual, wanted)


def test_twice_in_one_trace_and_again_in_the_next(llama: Any, gpt2: Any) -> None:
    for model, module, one, two in (
        (llama, llama.model.layers[3].mlp, activation(llama.model.layers[3].mlp), "self_down_proj_0"),
        (gpt2, gpt2.transformer.h[3], "add_0", "add_1"),
    ):
        found = []
        for _ in range(2):
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                first = getattr(module.source, one).output.save()
                again = getattr(module.source, one).output.save()
                second = getattr(module.source, two).output.save()
                repeated = getattr(module.source, two).output.save()
            assert torch.equal(first, again)
            found.append((first, second))
        assert torch.equal(found[0][0], found[1][0])
        assert str(found[0][1]) == str(found[1][1])


def test_in_company_and_over_steps(gpt2: Any) -> None:
    prompts = [PROMPT, OTHER, "Rome", PROMPT]
    with gpt2.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                mids = [].save()
                for _ in tracer.iter[:]:
                    mids.append(gpt2.transformer.h[2].source.add_0.output)
                result = tracer.result.save()
    for prompt, found, output in zip(prompts, mids, result, strict=True):
        ids = [*ids_of("gpt2", prompt), *output.outputs[0].token_ids[:-1]]
        assert_close(torch.cat(found), hf_stream("gpt2", ids).resid_mid[2], prompt)


def test_nothing_stays_behind(llama: Any) -> None:
    ids = ids_of("llama", OTHER)
    before = plain(llama, [ids], max_tokens=4)[0].outputs[0].token_ids
    with llama.trace(PROMPT, temperature=0.0, max_tokens=4):
        llama.model.layers[1].mlp.source.self_down_proj_0.output[0][:] = 0
    assert not any(llama.vllm_entrypoint.apply_model(watched_modules))
    assert plain(llama, [ids], max_tokens=4)[0].outputs[0].token_ids == before
    assert llama.in_flight() == 0


def test_only_steps_in_which_a_block_waits_run_eagerly(llama: Any) -> None:
    before = llama.stats()
    act = activation(llama.model.layers[1].mlp)
    with llama.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True):
        seen = getattr(llama.model.layers[1].mlp.source, act).output.save()
    after = llama.stats()
    assert after.eager_steps - before.eager_steps == 1
    assert after.plain_steps - before.plain_steps == 4


# Editing.


def test_an_edited_activation(llama: Any, gpt2: Any) -> None:
    act = activation(llama.model.layers[1].mlp)
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        getattr(llama.model.layers[1].mlp.source, act).output[2:, :20] = 1.5
        logits = llama.logits.save()

    def edit(x: torch.Tensor) -> torch.Tensor:
        x[2:, :20] = 1.5
        return x

    assert_close(
        logits, last_logits(hf_edited("llama", ids_of("llama"), inputs={"model.layers.1.mlp.down_proj": edit}))
    )

    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        operation = gpt2.transformer.h[1].mlp.source.self_act_0
        operation.output = operation.output * -0.5
        logits = gpt2.logits.save()
    wanted = hf_edited("gpt2", ids_of("gpt2"), {"transformer.h.1.mlp.act": lambda x: x * -0.5})
    assert_close(logits, last_logits(wanted))


def test_an_edited_query(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        llama.model.layers[2].self_attn.source.qkv_split_0.output[0][:, :HEAD] = 0
        logits = llama.logits.save()

    def edit(q: torch.Tensor) -> torch.Tensor:
        q[:, :HEAD] = 0
        return q

    assert_close(logits, last_logits(hf_edited("llama", ids_of("llama"), {"model.layers.2.self_attn.q_proj": edit})))


def test_an_edited_addition_and_its_inputs(gpt2: Any) -> None:
    ids = ids_of("gpt2")
    steer = torch.linspace(-1, 1, WIDTH)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        gpt2.transformer.h[1].source.add_0.output += steer
        after = gpt2.resid_post[1].save()
        logits = gpt2.logits.save()
    wanted = hf_edited("gpt2", ids, {"transformer.h.1.attn": lambda x: x + steer})
    assert_close(logits, last_logits(wanted))
    assert_close(after, wanted["transformer.h.1"].output)

    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        gpt2.transformer.h[1].source.add_0.input = gpt2.transformer.h[1].source.add_0.input + steer
        again = gpt2.logits.save()
    assert_close(again, last_logits(wanted))


def test_edits_of_several_requests_at_one_operation(gpt2: Any) -> None:
    prompts, scales = [PROMPT, OTHER, "Rome"], [0.0, 2.0, -1.0]
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt, scale in zip(prompts, scales, strict=True):
            with tracer.invoke(prompt):
                operation = gpt2.transformer.h[0].mlp.source.self_act_0
                operation.output = operation.output * scale
                logits = gpt2.logits.save()
        with tracer.invoke(PROMPT):
            untouched = gpt2.logits.save()
    for prompt, scale, found in zip(prompts, scales, logits, strict=True):
        wanted = hf_edited("gpt2", ids_of("gpt2", prompt), {"transformer.h.0.mlp.act": lambda x, by=scale: x * by})
        assert_close(found, last_logits(wanted), prompt)
    assert_close(untouched, last_logits(hf("gpt2", ids_of("gpt2"))))


def test_a_skipped_operation(llama: Any) -> None:
    ids = ids_of("llama")
    value = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(0))
    with llama.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            llama.model.layers[1].self_attn.source.self_attn_0.skip(value)
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            untouched = llama.logits.save()
    wanted = hf_edited("llama", ids, inputs={"model.layers.1.self_attn.o_proj": lambda _: value})
    assert_close(logits, last_logits(wanted))
    assert_close(untouched, last_logits(hf("llama", ids)))


def test_a_skipped_nested_operation(llama: Any) -> None:
    ids = ids_of("llama")
    value = torch.full((len(ids), 2 * WIDTH), 0.25)
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        act = llama.model.layers[1].mlp.act_fn
        act.source.self__forward_method_0.source.self_forward_native_0.skip(value)
        logits = llama.logits.save()
    wanted = hf_edited("llama", ids, inputs={"model.layers.1.mlp.down_proj": lambda _: value})
    assert_close(logits, last_logits(wanted))


# Refusals.


def test_an_operation_that_has_gone_by_or_is_not_reached(llama: Any) -> None:
    act = activation(llama.model.layers[1].mlp)
    with pytest.raises(OutOfOrderError, match=rf"layers\.1\.mlp\.source\.{act}\.output` has gone by") as caught:
        with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
            llama.model.layers[1].mlp.source.self_down_proj_0.input
            seen = getattr(llama.model.layers[1].mlp.source, act).output.save()
    assert caught.traceback[-1].path.name == "test_source.py"
    with pytest.raises(OutOfOrderError, match=rf"layers\.1\.mlp\.source\.{act}\.output` has gone by"):
        with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
            llama.model.layers[2].output
            seen = getattr(llama.model.layers[1].mlp.source, act).output.save()
    with pytest.raises(NotReachedError, match=r"layers\.1\.source\.self_input_layernorm_0\.output` was not reached"):
        with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
            seen = llama.model.layers[1].source.self_input_layernorm_0.output.save()


def test_a_write_that_does_not_fit(gpt2: Any) -> None:
    count = len(ids_of("gpt2"))
    text = rf"transformer\.h\.1\.source\.add_0\.output takes shape \({count}, {WIDTH}\) .*got shape \(1, {WIDTH}\)"
    with pytest.raises(WriteError, match=text):
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
            gpt2.transformer.h[1].source.add_0.output = torch.zeros(1, WIDTH)


# The logits phase.


def test_operations_of_the_logits_processor(llama: Any, gpt2: Any) -> None:
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        seen = hf(name, ids_of(name))
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            processor = model.logits_processor
            hidden = processor.inputs[0][1].save()
            head = processor.source.self__get_logits_0.source.self__apply_head_0
            given = head.inputs[0][1].save()
            raw = head.output.save()
            trimmed = processor.source.self__get_logits_0.output.save()
            output = processor.output.save()
            logits = model.logits.save()
        assert hidden.shape == (1, WIDTH)
        assert torch.equal(given, hidden)
        assert_close(raw[:, : trimmed.shape[1]], last_logits(seen))
        assert torch.equal(trimmed, output)
        assert torch.equal(output, logits)
        assert layers(model)[0].source is not None


def test_an_edit_in_the_logits_processor(llama: Any) -> None:
    with llama.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(OTHER):
            untouched = llama.logits.save()
        with tracer.invoke(PROMPT):
            llama.logits_processor.source.self__get_logits_0.output[:, 7] = 1000.0
            samples = llama.samples.save()
    assert samples.tolist() == [7]
    assert_close(untouched, last_logits(hf("llama", ids_of("llama", OTHER))))
