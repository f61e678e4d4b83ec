"""Blocks as they are written in the docs pass the guard, and give the values that they give without it."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from insitu.guard import GuardLimits, LimitError, NotAllowedError
from tests.docs import pages
from tests.engine import remote
from tests.engine.helpers import PROMPT, layers

PROMPTS = [PROMPT, "The capital of Japan is", "Water boils at"]
SCALE = 2.0


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


def test_reading(model: Any) -> None:
    blocks = layers(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        mlp = blocks[1].mlp.output.save()
        logits = model.logits.save()
        result = tracer.result.save()
    wanted = (mlp, logits, result.outputs[0].text)
    with remote.trace(model, PROMPT) as tracer:
        mlp = blocks[1].mlp.output.save()
        logits = model.logits.save()
        result = tracer.result.save()
    assert same((mlp, logits, result.outputs[0].text), wanted)
    assert list(result.outputs[0].token_ids) == [int(logits.argmax())]


def test_editing_in_every_way(model: Any) -> None:
    vector, blocks = torch.linspace(-1, 1, model_width(model)), layers(model)

    def edit(tracer: Any) -> Any:
        model.resid_post[0][-1] += SCALE * vector
        model.resid_post[1] *= 1.5
        model.attn_out[2][:] -= 0.5
        for layer in blocks[2:4]:
            layer.mlp.output[:] *= 0
        blocks[-1].mlp.output = blocks[-1].mlp.output + vector
        model.logits[:, 5] = 100.0
        return model.logits.clone(), model.samples

    assert same(remote.run(model, edit, PROMPT), model.run(edit, PROMPT, temperature=0.0, max_tokens=1))


def model_width(model: Any) -> int:
    return model.run(lambda tracer: model.embed.shape[-1], PROMPT, max_tokens=1)


def test_a_logit_lens(llama: Any) -> None:
    model = llama

    def lens(tracer: Any) -> Any:
        found = []
        for layer in model.model.layers:
            hidden, residual = layer.output
            scores = model.unembed(model.model.norm(hidden + residual))
            found.append(scores.softmax(-1).max(-1))
        return [(part.values[-1].item(), part.indices[-1].item()) for part in found]

    assert remote.run(model, lens, PROMPT) == model.run(lens, PROMPT, temperature=0.0, max_tokens=1)


def test_several_prompts_and_patching(llama: Any) -> None:
    model = llama
    for tracing in (lambda **s: model.trace(**s), lambda **s: remote.trace(model, **s)):
        with tracing(temperature=0.0, max_tokens=2) as tracer:
            with tracer.invoke(PROMPTS[1]):
                other = model.model.layers[1].output[0][-1] + model.model.layers[1].output[1][-1]
            with tracer.invoke(PROMPT):
                hidden, residual = model.model.layers[1].output
                hidden[-1] = other
                residual[-1] = 0
                patched = model.logits.save()
            with tracer.invoke(PROMPTS[2]):
                answer = tracer.result.save()
        if tracing.__code__.co_freevars == ("model",) and "wanted" not in locals():
            wanted = (patched, answer.outputs[0].text)
    assert same((patched, answer.outputs[0].text), wanted)


def helper(value: Any, scale: float = 1.0) -> Any:
    return centred(value) * scale * SCALE


def centred(value: Any) -> Any:
    return value - value.mean(-1, keepdim=True)


def test_steps_helpers_and_caches(model: Any) -> None:
    def steps(tracer: Any) -> Any:
        cache = tracer.cache(modules="**.mlp")
        rows, words = [], []
        for step in tracer.iter[:]:
            rows.append(helper(model.resid_post[1][-1], scale=0.5))
            words.append((step, model.samples.item()))
        return rows, words, [value.shape for value in cache[next(iter(cache))].output], tracer.tokens

    sampling = {"max_tokens": 3, "ignore_eos": True}
    wanted = model.run(steps, PROMPT, temperature=0.0, **sampling)
    assert same(remote.run(model, steps, PROMPT, **sampling), wanted)


def test_with_steps_and_stop(model: Any) -> None:
    with remote.trace(model, PROMPT, max_tokens=10, ignore_eos=True) as tracer:
        shapes = [].save()
        with tracer.iter[:] as step:
            shapes.append(tuple(model.resid_post[0].shape))
            if step == 2:
                tracer.stop()
        text = model.tokenizer.decode(model.tokenizer.encode("a b")).save()
        result = tracer.result.save()
    assert [shape[0] for shape in shapes] == [shapes[0][0], 1, 1]
    assert result.outputs[0].finish_reason == "stop"
    assert text == model.tokenizer.decode(model.tokenizer.encode("a b"))


def test_the_cache_comes_home(model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        here = tracer.cache(modules="**.mlp")
    with remote.trace(model, PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        cache = tracer.cache(modules="**.mlp")
    assert list(cache) == list(here)
    assert all(same(cache[path].output, here[path].output) for path in here)


def test_an_error_has_the_lines_of_the_client(model: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with remote.trace(model, PROMPT):
            x = model.logits
            x / (1 // 0)
    entry = caught.value.__traceback__
    while entry.tb_next is not None:
        entry = entry.tb_next
    assert entry.tb_frame.f_code.co_filename == __file__
    assert linecache.getline(__file__, entry.tb_lineno).strip() == "x / (1 // 0)"


def test_a_place_that_has_gone_by_is_the_same_error(model: Any) -> None:
    with pytest.raises(insitu.OutOfOrderError, match=r"logits|gone by"):
        with remote.trace(model, PROMPT):
            model.logits.sum()
            model.resid_post[0].sum()


def test_a_block_that_loops_for_ever_is_stopped_and_others_go_on(model: Any) -> None:
    limits = GuardLimits(operations=5000)
    with pytest.raises(LimitError, match="it has done 5000 operations"):
        with remote.trace(model, PROMPT, limits=limits):
            x = model.resid_post[0]
            while True:
                pass
    assert model.in_flight() == 0
    with remote.trace(model, PROMPT, limits=limits):
        shape = tuple(model.logits.shape).save()
    assert shape[0] == 1


def test_only_the_time_of_the_block_itself_counts(model: Any) -> None:
    with remote.trace(model, PROMPT, limits=GuardLimits(seconds=0.5), max_tokens=12, ignore_eos=True) as tracer:
        count = 0
        for step in tracer.iter[:]:
            model.resid_post[0].sum()
            count += 1
        done = count.save()
    assert done == 12


@pytest.mark.parametrize(
    "attribute", ["trace", "vllm_entrypoint", "dispatch", "close", "stats", "_engine", "in_flight"]
)
def test_the_engine_is_not_reached_through_the_model(model: Any, attribute: str) -> None:
    with pytest.raises(NotAllowedError, match=attribute):
        with remote.trace(model, PROMPT):
            getattr(model, attribute)


@pytest.mark.parametrize("attribute", ["invoke", "_engine", "plan", "run_block", "target", "run_function"])
def test_the_engine_is_not_reached_through_the_tracer(model: Any, attribute: str) -> None:
    with pytest.raises(NotAllowedError, match=attribute):
        with remote.trace(model, PROMPT) as tracer:
            getattr(tracer, attribute)


def test_attention_is_not_called_as_it_would_write_to_the_cache_of_all(model: Any) -> None:
    path = next(path for path, module in model._engine.outline.modules.items() if module.kind == "Attention")
    with pytest.raises(NotAllowedError, match=r"can't be called in a restricted block, as .* is a Attention"):
        with remote.trace(model, PROMPT):
            q = model.q[0].flatten(1)
            model.get(path)(q, q, q)


def test_a_module_is_called_with_so_many_rows_at_most(model: Any) -> None:
    with pytest.raises(NotAllowedError, match="called with 70 rows; 50 are the most"):
        with remote.trace(model, PROMPT, limits=GuardLimits(rows=50)):
            model.unembed(model.final_norm[-1:].repeat(70, 1))


def test_saving_too_much_is_the_block_s_error(model: Any) -> None:
    with pytest.raises(LimitError, match="it saves more than 1000 bytes"):
        with remote.trace(model, PROMPT, limits=GuardLimits(saved_bytes=1000)):
            rows = model.resid_post[0].save()


def test_a_cache_that_grows_too_large_is_the_block_s_error(model: Any) -> None:
    limits = GuardLimits(saved_bytes=3000)
    with pytest.raises(insitu.RequestError, match="would hold more bytes than it may"):
        with remote.trace(model, PROMPT, limits=limits, max_tokens=8, ignore_eos=True) as tracer:
            cache = tracer.cache()
            for step in tracer.iter[:]:
                pass


@pytest.mark.slow
@pytest.mark.in_process
@pytest.mark.parametrize("page", ["walkthrough", "blocks"])
def test_pages_of_the_docs_print_the_same_under_the_guard(page: str, tmp_path: Path) -> None:
    file, result = pages.ROOT / "docs" / f"{page}.md", tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.engine.remote_pages", str(file), str(result)]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(result.read_text()) == [block.output or "" for block in pages.blocks(file)]


def test_a_module_is_called_with_what_fits_it_as_kernels_do_not_look(llama: Any) -> None:
    model, width = llama, model_width(llama)
    for shapes in [((64, width), (1, width)), ((1, 4 * width),)]:
        with pytest.raises(insitu.ArgumentError, match=f"called with tensors of one shape, {width} wide"):
            with remote.trace(model, PROMPT):
                model.model.norm(*[torch.ones(shape) for shape in shapes])
    for wrong in (-1, 10**6):
        with pytest.raises(insitu.ArgumentError, match=r"called with ids from 0 to \d+"):
            with remote.trace(model, PROMPT):
                model.model.embed_tokens(torch.tensor([wrong]))


def test_what_a_block_passes_on_is_looked_at_first(model: Any) -> None:
    def passing(tracer: Any) -> Any:
        shared = [1]
        for _ in range(60):
            shared = [shared, shared]
        return model.unembed(shared)

    def raising(tracer: Any) -> Any:
        raise ValueError(model, tracer)

    with pytest.raises(LimitError, match="it has done 1000000 operations"):
        remote.run(model, passing, PROMPT)
    with pytest.raises(ValueError, match="<Trace>"):
        remote.run(model, raising, PROMPT)
    with pytest.raises(insitu.UnknownModuleError):
        with remote.trace(model, PROMPT) as tracer:
            tracer.cache(modules="*" * 30 + "x")
