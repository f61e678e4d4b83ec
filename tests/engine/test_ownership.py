"""What a block holds keeps the values it had, and comes home as ordinary tensors."""

from __future__ import annotations

from typing import Any

import torch

from tests import models
from tests.engine.helpers import (
    PROMPT,
    assert_close,
    hf_stream,
    ids_of,
    layers,
    oracle_logits,
    summed,
)
from tests.models import LAYERS, WIDTH


def test_nothing_saved_shares_memory_and_all_of_it_is_right(name: str, model: Any) -> None:
    """Every sublayer of every layer, no clone anywhere (what engines reuse their buffers for)."""
    attention = "attn" if name == "gpt2" else "self_attn"
    with model.trace(PROMPT, max_tokens=1):
        found = []
        for layer in layers(model):
            into = layer.inputs
            attended = layer.get(attention).output
            mixed = layer.mlp.output
            found.append((into, attended, mixed, layer.output))
        found.save()
        logits = model.logits.save()
    stream = hf_stream(name, ids_of(name))
    tensors = [logits]
    for i, (into, attended, mixed, output) in enumerate(found):
        assert_close(attended, stream.attn_out[i], f"attention of layer {i}")
        assert_close(mixed, stream.mlp_out[i], f"mlp of layer {i}")
        assert_close(summed(output), stream.resid_post[i], f"layer {i}")
        parts = [part for part in into[0] if isinstance(part, torch.Tensor) and part.is_floating_point()]
        assert_close(sum(parts[1:], parts[0]), stream.resid_pre[i], f"input of layer {i}")
        tensors += [*parts, attended, mixed, *(output if isinstance(output, tuple) else [output])]
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(memory)) == len(memory)
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_views_taken_before_later_layers_run_keep_their_values(name: str, model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1):
        lasts = [summed(layer.output)[-1] for layer in layers(model)].save()
        normed = model.final_norm
        last, first = normed[-1].save(), normed[0, :5].save()
        column = normed[:, 3].save()
        logits = model.logits.save()
    stream = hf_stream(name, ids_of(name))
    for i in range(LAYERS):
        assert_close(lasts[i], stream.resid_post[i][-1], f"layer {i}")
    assert_close(last, stream.final_norm[-1])
    assert_close(first, stream.final_norm[0, :5])
    assert_close(column, stream.final_norm[:, 3])
    assert_close(logits, stream.logits[-1:])
    for view in (last, first, column):
        assert view.untyped_storage().nbytes() == view.numel() * view.element_size()


def test_views_taken_at_a_place_see_edits_made_there(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        output = llama.model.layers[1].mlp.output
        view = output[-1].save()
        kept = output[-1].clone().save()
        output[:] = 0.0
        llama.model.layers[2].mlp.output[:] = 1.0
        late = view.clone().save()
    assert_close(kept, hf_stream("llama", ids_of("llama")).mlp_out[1][-1])
    assert view.abs().max() == 0
    assert late.abs().max() == 0


def test_a_late_write_does_not_change_the_model(name: str, model: Any) -> None:
    stream = hf_stream(name, ids_of(name))
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        held = []
        for layer in layers(model):
            held.append((layer.mlp.output, layer.output))
            for early in held[:-1]:
                for tensor in (early[0], *(early[1] if isinstance(early[1], tuple) else (early[1],))):
                    tensor[:] = 1e4
        logits = model.logits.save()
        for mixed, _ in held:
            mixed.fill_(-1e4)
        drawn = model.samples.save()
        logits_later = logits.clone().save()
        logits[:] = 0.0
        result = tracer.result.save()
    assert_close(logits_later, stream.logits[-1:])
    assert logits.abs().max() == 0
    assert drawn.item() == stream.logits[-1].argmax().item()
    assert list(result.outputs[0].token_ids) == models.greedy(models.tiny(name), ids_of(name), 3)


def test_what_comes_home_is_an_ordinary_tensor(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        output = llama.model.layers[1].mlp.output.save()
        nested = {"view": output[-1], "list": [output * 2], "pair": llama.model.layers[1].output}.save()
        with torch.inference_mode():
            of_inference = (output + 1).save()
        by_call = llama.model.layers[2].mlp(output).save()
        normed = llama.final_norm.save()
        unembedded = llama.unembed(normed).save()
        logits = llama.logits.save()
    found = [output, nested["view"], *nested["list"], *nested["pair"], of_inference, by_call, normed, unembedded]
    for tensor in [*found, logits]:
        assert not tensor.is_inference()
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"
        tensor += 1
        tensor.requires_grad_()
        (tensor * tensor).sum().backward()
        assert tensor.grad is not None
        assert_close(tensor.grad, 2 * tensor.detach())


def test_autograd_works_in_a_block(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        hidden = llama.model.layers[1].mlp.output
        probe = torch.ones(WIDTH, requires_grad=True)
        with torch.enable_grad():
            (hidden @ probe).sum().backward()
        gradient = probe.grad.save()
        leaf = hidden.detach().clone().requires_grad_()
        with torch.enable_grad():
            leaf.square().sum().backward()
        llama.model.layers[1].mlp.output += 0.1 * leaf.grad
        logits = llama.logits.save()
    mixed = hf_stream("llama", ids_of("llama")).mlp_out[1]
    assert_close(gradient, mixed.sum(0))
    assert_close(logits, oracle_logits("llama", "model.layers.1.mlp", "output", lambda x: x + 0.1 * 2 * x))
