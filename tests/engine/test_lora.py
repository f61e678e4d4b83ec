"""LoRA adapters: one for each request, none for the others, and names and values as without."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_edited, hf_stream, ids_of, own_engine
from tests.models import LAYERS, WIDTH

pytestmark = pytest.mark.slow

RANK, ALPHA = 8, 16
TARGETS = {"self_attn.q_proj": (WIDTH, WIDTH), "mlp.down_proj": (2 * WIDTH, WIDTH)}
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def write_adapter(folder: Path, seed: int, prefix: str = "model.layers", rank: int = RANK) -> str:
    """An adapter of large random weights for `TARGETS` in every layer, its modules named below `prefix`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, (inner, outer) in TARGETS.items():
            path = f"base_model.model.{prefix}.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = 0.3 * torch.randn(rank, inner, generator=generator)
            weights[f"{path}.lora_B.weight"] = 0.3 * torch.randn(outer, rank, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": ALPHA, "target_modules": [name.split(".")[1] for name in TARGETS]}
    config |= {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def model(engines: Any) -> Iterator[Any]:
    with own_engine(
        engines, "llama", **engines.settings, enable_lora=True, max_loras=2, max_lora_rank=RANK, max_num_seqs=8
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest, LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    one, other = (LoRARequest(f"a{seed}", seed, write_adapter(folder / f"a{seed}", seed)) for seed in (1, 2))
    return one, other


def adapted(folder: str, ids: list[int]) -> dict[str, models.Activation]:
    """What transformers computes, an adapter added to what its modules return."""
    weights = load_file(f"{folder}/adapter_model.safetensors")
    model = models.oracle(models.tiny("llama"))
    hooks = []
    for layer in range(LAYERS):
        for name in TARGETS:
            path = f"model.layers.{layer}.{name}"
            down, up = (weights[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")

            def add(module: Any, args: Any, output: Any, down: Any = down, up: Any = up) -> Any:
                return output + args[0] @ down.T @ up.T * (ALPHA / RANK)

            hooks.append(model.get_submodule(path).register_forward_hook(add))
    try:
        return models.hf_activations(model, ids)
    finally:
        for hook in hooks:
            hook.remove()


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def read(model: Any, tracer: Any) -> dict[str, Any]:
    """What one request sees of places with adapters in them and after them."""
    found = {
        "qkv": model.model.layers[0].self_attn.qkv_proj.output[0],
        "down": model.model.layers[1].mlp.down_proj.output[0],
        "resid": model.resid_post[LAYERS - 1],
        "unembedded": model.unembed(model.final_norm),
        "logits": model.logits,
    }
    return {**found, "tokens": tokens_of(tracer.result)}


def test_each_invoke_has_its_own_adapter_or_none(model: Any, loras: Any) -> None:
    one, other = loras
    ids, company = ids_of("llama"), (None, one, other, one, None)
    alone = {}
    for lora in (None, one, other):
        with model.trace(ids, **GREEDY, lora_request=lora) as tracer:
            seen = read(model, tracer).save()
        alone[lora] = seen
    with model.trace(**GREEDY) as tracer:
        for lora in company:
            with tracer.invoke(ids, lora_request=lora):
                seen = read(model, tracer).save()
    for lora, values in zip(company, seen, strict=True):
        assert values["tokens"] == alone[lora]["tokens"]
        for name in ("qkv", "down", "resid", "logits"):
            assert_close(values[name], alone[lora][name], name)
        assert_close(values["unembedded"][-1:], values["logits"])
    for lora in loras:
        wanted = adapted(lora.lora_path, ids)
        assert_close(alone[lora]["qkv"][:, :WIDTH], wanted["model.layers.0.self_attn.q_proj"].output, bound=5e-5)
        assert_close(alone[lora]["logits"], wanted[""].output["logits"][-1:], bound=5e-5)
        assert (alone[lora]["resid"] - alone[None]["resid"]).abs().max() > 1
    assert_close(alone[None]["resid"], hf_stream("llama", ids).resid_post[-1])
    assert alone[one]["tokens"] != alone[None]["tokens"]


def test_plain_requests_of_the_same_batch_have_their_own_adapter_or_none(model: Any, loras: Any) -> None:
    """vLLM's kernels for the CPU by themselves apply the last adapter to rows without one."""
    prompts = [{"prompt_token_ids": ids_of("llama")}] * 3
    asked = [None, *loras]
    llm, params = model.vllm_entrypoint, SamplingParams(**GREEDY)
    alone = [
        llm.generate([prompt], params, lora_request=lora, use_tqdm=False)[0]
        for prompt, lora in zip(prompts, asked, strict=True)
    ]
    together = llm.generate(prompts, [params] * 3, lora_request=asked, use_tqdm=False)
    assert [tokens_of(output) for output in together] == [tokens_of(output) for output in alone]


def test_names_are_those_of_a_model_without_adapters(model: Any, llama: Any) -> None:
    def paths(engine: Any) -> list[str]:
        kept = engine.dispatch()._engine.outline.modules
        return [path for path in kept if "base_layer" not in path.split(".")]

    assert paths(model) == paths(llama)


def test_edits_and_skips_of_modules_with_adapters(model: Any, loras: Any) -> None:
    ids = ids_of("llama")
    with model.trace(max_tokens=1) as tracer:
        for lora in (None, loras[0]):
            with tracer.invoke(ids, lora_request=lora):
                model.model.layers[1].mlp.down_proj.output[0][:] = 0.5
                logits = model.logits.save()
        with tracer.invoke(ids):
            model.model.layers[1].mlp.down_proj.skip((torch.full((len(ids), WIDTH), 0.5), None))
            skipped = model.logits.save()
        with tracer.invoke(ids):
            model.mlp_out[1] = torch.full((len(ids), WIDTH), 0.5)
            named = model.logits.save()

    for value in (skipped, named, logits[0]):
        wanted = hf_edited("llama", ids, {"model.layers.1.mlp": lambda x: torch.full_like(x, 0.5)})
        assert_close(value, wanted[""].output["logits"][-1:])
    assert (logits[1] - logits[0]).abs().max() > 0.1


def test_operations_inside_a_module_with_an_adapter(model: Any, loras: Any, engines: Any) -> None:
    down = model.model.layers[0].mlp.down_proj
    assert "self_apply_0" in str(down.source)
    if "tensor_parallel_size" in engines.settings:  # a summand on each rank, as wide as what is cut
        with pytest.raises(insitu.LocationError, match="can't be told how"):
            model.run(lambda tracer: down.source.self_apply_0.output, PROMPT, max_tokens=1, lora_request=loras[0])
        return
    with model.trace(ids_of("llama"), max_tokens=1, lora_request=loras[0]):
        applied = down.source.self_apply_0.output.save()
        output = model.mlp_out[0].save()
    assert torch.equal(applied, output)
    assert_close(output, adapted(loras[0].lora_path, ids_of("llama"))["model.layers.0.mlp"].output, bound=5e-5)


def test_embeddings_take_ids_of_the_whole_vocabulary(model: Any) -> None:
    ids = ids_of("llama")
    other = [400 + i for i in range(len(ids))]  # beyond the context's length, which positions stay below
    with model.trace(ids, max_tokens=1):
        model.model.embed_tokens.input[:] = torch.tensor(other)
        logits = model.logits.save()
    assert_close(logits, hf_stream("llama", other).logits[-1:])


def test_a_block_calls_modules_with_its_own_adapter_whatever_the_batch(model: Any, loras: Any) -> None:
    with model.trace(max_tokens=1) as tracer:
        for lora in (loras[1], None, loras[0]):
            with tracer.invoke(PROMPT, lora_request=lora):
                down = model.model.layers[1].mlp.down_proj
                given = down.input
                value = down(given[2:5])[0].save()
                wanted = down.output[0][2:5].save()
                after = model.logits.save()
    for returned, all_rows in zip(value, wanted, strict=True):
        assert_close(returned, all_rows)
    for lora, logits in zip((loras[1], None, loras[0]), after, strict=True):
        assert_close(logits, model.run(lambda tracer: model.logits, PROMPT, max_tokens=1, lora_request=lora))


def test_an_adapter_of_which_the_model_has_nothing_is_refused(model: Any, tmp_path: Path) -> None:
    lora = LoRARequest("wrapped", 7, write_adapter(tmp_path / "wrapped", 1, prefix="language_model.model.layers"))
    with pytest.raises(insitu.ArgumentError, match=r"of its 8 modules this model has 0.*language_model") as caught:
        model.trace(PROMPT, lora_request=lora)
    assert "the nearest is `model.layers." in str(caught.value)


def test_an_adapter_of_which_the_model_has_a_part_says_so(model: Any, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "part", 1))
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name.replace("layers.3", "layers.9"): value for name, value in weights.items()}, folder / "x")
    (folder / "x").rename(folder / "adapter_model.safetensors")
    lora = LoRARequest("part", 8, str(folder))
    with pytest.warns(UserWarning, match="of its 8 modules this model has 6") as noted:
        model.run(lambda tracer: model.logits, PROMPT, max_tokens=1, lora_request=lora)
    assert noted[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model.run(lambda tracer: model.logits, PROMPT, max_tokens=1, lora_request=lora)


@pytest.mark.parametrize("fault", ["no folder", "too high a rank"])
def test_a_bad_adapter_is_refused_before_anything_runs(model: Any, tmp_path: Path, fault: str) -> None:
    folder = str(tmp_path / "x") if fault == "no folder" else write_adapter(tmp_path / "x", 1, rank=16)
    with pytest.raises(Exception, match=r"No adapter found|rank"):
        model.trace(PROMPT, lora_request=LoRARequest("bad", 9, folder))
    assert model.in_flight() == 0
    logits = model.run(lambda tracer: model.logits, PROMPT, max_tokens=1)
    assert_close(logits, hf_stream("llama", ids_of("llama")).logits[-1:])


def test_an_engine_without_adapters_says_so(llama: Any, loras: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match="enable_lora=True"):
        llama.trace(PROMPT, lora_request=loras[0])
