"""Other ways to the same values, each in a process and, if it has to be, an interpreter of its own.

`python benchmarks/peers.py KIND FOLDER SETTINGS` answers lines of JSON: asked for a work and prompts, it says how long
that took. It imports nothing of this project, so that an interpreter that has only the peer can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers_in_vllm import KINDS as IN_VLLM  # beside this file, which is run as a script

Prompts = list[list[int]]
Work = Callable[[Prompts], object]
AT_ONCE = 64
"""Prompts in a batch of those that make batches themselves."""


def _loaded(folder: str, settings: dict[str, Any]) -> Any:
    """The model of transformers, with random weights where the folder has none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, settings["dtype"])
    if any(Path(folder).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(settings["device"]).eval()
    with torch.device(settings["device"]):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()


def _batches(prompts: Prompts, device: str) -> list[Any]:
    import torch

    return [torch.tensor(prompts[i : i + AT_ONCE], device=device) for i in range(0, len(prompts), AT_ONCE)]


def transformers(folder: str, settings: dict[str, Any]) -> dict[str, Work]:
    import torch

    model, device = _loaded(folder, settings), settings["device"]
    layers = model.model.layers

    def run(prompts: Prompts, hooks: dict[int, Callable[..., Any]]) -> None:
        handles = [layers[number].register_forward_hook(hook) for number, hook in hooks.items()]
        with torch.inference_mode():
            for batch in _batches(prompts, device):
                model(batch, use_cache=False, logits_to_keep=1).logits.argmax(-1).cpu()
        for handle in handles:
            handle.remove()

    def keep(kept: list[Any], rows: slice = slice(None)) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output)[:, rows].cpu())

        return hook

    def one(prompts: Prompts) -> object:
        kept: list[Any] = []
        run(prompts, {len(layers) // 2: keep(kept)})
        return kept

    def every(prompts: Prompts, rows: slice = slice(None)) -> object:
        kept: list[Any] = []
        run(prompts, dict.fromkeys(range(len(layers)), keep(kept, rows)))
        return kept

    def vectors(prompts: Prompts) -> None:
        added = iter(torch.randn(len(prompts), model.config.hidden_size).to(model.device, model.dtype).split(AT_ONCE))

        def add(module: Any, args: Any, output: Any) -> Any:
            more = next(added)[:, None]
            return (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more

        run(prompts, {len(layers) // 2: add})

    return {"one": one, "last": partial(every, rows=slice(-1, None)), "every": every, "vectors": vectors}


def nnsight(folder: str, settings: dict[str, Any]) -> dict[str, Work]:
    """On the model of transformers; its path through vLLM needs a GPU."""
    import torch
    from nnsight import NNsight

    inner, device = _loaded(folder, settings), settings["device"]
    model = NNsight(inner)
    layers, middle = inner.config.num_hidden_layers, inner.config.num_hidden_layers // 2
    given = {"use_cache": False, "logits_to_keep": 1}

    def one(prompts: Prompts) -> object:
        kept: list[Any] = []
        for batch in _batches(prompts, device):
            with torch.inference_mode(), model.trace(batch, **given):
                value = model.model.layers[middle].output.cpu().save()
            kept.append(value)
        return kept

    def every(prompts: Prompts, rows: slice = slice(None)) -> object:
        kept: list[Any] = []
        for batch in _batches(prompts, device):
            with torch.inference_mode(), model.trace(batch, **given):
                values = [model.model.layers[number].output[:, rows].cpu() for number in range(layers)].save()
            kept.append(values)
        return kept

    def vectors(prompts: Prompts) -> None:
        width = inner.config.hidden_size
        for batch in _batches(prompts, device):
            added = torch.randn(len(batch), 1, width).to(inner.device, inner.dtype)
            with torch.inference_mode(), model.trace(batch, **given):
                model.model.layers[middle].output[:] += added
                logits = model.output.logits.save()

    return {"one": one, "last": partial(every, rows=slice(-1, None)), "every": every, "vectors": vectors}


def vllm_lens(folder: str, settings: dict[str, Any]) -> dict[str, Work]:
    import vllm_lens  # noqa: F401 - a plugin of vLLM's, which reads the sampling parameters' `extra_args`
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **settings["engine"])
    count = llm.model_config.get_num_layers(llm.llm_engine.vllm_config.parallel_config)

    def run(prompts: Prompts, layers: list[int]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"output_residual_stream": layers})
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def every(prompts: Prompts) -> None:
        run(prompts, [*range(count)])  # whole, whatever of it is wanted

    return {"one": lambda prompts: run(prompts, [count // 2]), "last": every, "every": every}


KINDS = {"transformers": transformers, "nnsight": nnsight, "vllm-lens": vllm_lens, **IN_VLLM}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed meanwhile is no answer
    kind, folder, settings = sys.argv[1:]
    works: dict[str, Work] = {}
    try:
        works = KINDS[kind](folder, json.loads(settings))
        print(json.dumps({"works": sorted(works)}), file=answers)
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    for line in sys.stdin:
        asked = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            kept = works[asked["work"]](asked["prompts"])
            took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            del kept
        except Exception as error:
            took = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(took), file=answers)


if __name__ == "__main__":
    main()
