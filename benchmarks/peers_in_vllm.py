"""Libraries that work inside vLLM on a GPU: what `peers.py` runs of them.

Works, each of the middle layer's output: "one", the prompt's rows; "steps", every step's rows; "vectors", one of its
own added to each request at every step. "last" and "every": the prompt's last row and all rows, of every layer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Work = Callable[[Prompts], object]
SAMPLING = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def _shape(folder: str) -> tuple[int, int]:
    config = json.loads((Path(folder) / "config.json").read_text())
    return config["num_hidden_layers"], config["hidden_size"]


def nnsight(folder: str, settings: dict[str, Any], tapped: bool = False) -> dict[str, Work]:
    import nnsight
    import torch
    from nnsight.modeling.vllm import VLLM

    count, width = _shape(folder)
    middle = count // 2
    engine = {
        key: value for key, value in settings["engine"].items() if key not in ("enforce_eager", "skip_tokenizer_init")
    }
    taps = {"taps": [f"model.layers.{middle}.output"]} if tapped else {}
    model = VLLM(folder, dispatch=True, **taps, **engine)
    sampling = {**SAMPLING, "max_tokens": settings["max_tokens"]}

    def one(prompts: Prompts) -> object:
        with model.trace(**sampling) as tracer:
            kept = nnsight.save([None] * len(prompts))
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    kept[i] = model.model.layers[middle].output[0].clone()
        assert all(value.shape == (len(prompts[0]), width) for value in kept)
        return kept

    def every(prompts: Prompts, rows: slice = slice(None)) -> object:
        with model.trace(**sampling) as tracer:
            kept = nnsight.save([[] for _ in prompts])
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    for number in range(count):
                        kept[i].append(model.model.layers[number].output[0][rows].clone())
        assert all(len(values) == count for values in kept)
        return kept

    def steps(prompts: Prompts) -> object:
        with model.trace(**sampling) as tracer:
            kept = nnsight.save([[] for _ in prompts])
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        kept[i].append(model.model.layers[middle].output[0].clone())
        assert all(len(values) == sampling["max_tokens"] for values in kept)
        return kept

    def vectors(prompts: Prompts) -> None:
        added = torch.randn(len(prompts), width, dtype=torch.bfloat16, device="cuda")
        with model.trace(**sampling) as tracer:
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        model.model.layers[middle].output[0][:] += added[i]

    one_layer = {"one": one, "steps": steps, "vectors": vectors}
    return one_layer if tapped else {**one_layer, "last": partial(every, rows=slice(-1, None)), "every": every}


def interp_engine(folder: str, settings: dict[str, Any], static: bool = False) -> dict[str, Work]:
    """On an engine of one's own, as its `vllm_plugin` has it, each request registered for itself."""
    from interp_engine import WORKER_EXTENSION_CLS, Address, capture_engine_kwargs, decode_capture_payload
    from interp_engine.vllm_capture import static as statics

    count, width = _shape(folder)
    point = Address("resid_post", count // 2)
    engine = {**settings["engine"], "worker_extension_cls": WORKER_EXTENSION_CLS}
    if static:
        os.environ[statics.STATIC_ENV] = statics.encode_static_env([point], [point])
        statics.apply_breakable_env([point], [point])
    else:
        engine |= capture_engine_kwargs()

    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **engine)
    ids = iter(range(10**9))
    capture, collect, steer, unsteer = (
        ("register_static_capture", "collect_static", "register_static_write", "unregister_static_write")
        if static
        else ("register_capture", "collect_request", "register_steering", "unregister_steering")
    )

    def generate(names: Sequence[str], prompts: Prompts) -> None:
        params = SamplingParams(**SAMPLING, max_tokens=settings["max_tokens"])
        for name, prompt in zip(names, prompts, strict=True):
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()

    def captured(prompts: Prompts, rows: int) -> object:
        names = [f"own-{next(ids):09d}" for _ in prompts]
        for name in names:
            llm.collective_rpc(capture, args=(name, [f"resid_post.{point.layer}"]))
        generate(names, prompts)
        kept = [decode_capture_payload(llm.collective_rpc(collect, args=(name,))[0])[point] for name in names]
        assert all(value.shape[-2] >= rows and value.shape[-1] == width for value in kept), [kept[0].shape, rows]
        return kept

    def vectors(prompts: Prompts) -> None:
        names = [f"own-{next(ids):09d}" for _ in prompts]
        for name, vector in zip(names, torch.randn(len(prompts), width), strict=True):
            spec = {"layer": point.layer, "op": "additive", "coeff": 1.0, "vector": vector.tolist()}
            llm.collective_rpc(steer, args=(name, [spec]))
        generate(names, prompts)
        for name in names:
            llm.collective_rpc(unsteer, args=(name,))

    def read(prompts: Prompts) -> object:  # every step, whatever of it is wanted
        return captured(prompts, len(prompts[0]) + settings["max_tokens"] - 1)

    return {"one": read, "steps": read, "vectors": vectors}


def hotwire(folder: str, settings: dict[str, Any]) -> dict[str, Work]:
    """Its vectors lie in files, from before the engine starts."""
    import torch

    count, width = _shape(folder)
    many = settings["engine"]["max_num_seqs"]
    files = tempfile.mkdtemp()
    for i in range(many):
        torch.save(torch.randn(width), f"{files}/v{i}.pt")
    os.environ |= {"HOTWIRE_VECTORS": files, "HOTWIRE_SLOTS": str(many)}

    from vllm import LLM, SamplingParams

    llm = LLM(folder, **settings["engine"])

    def vectors(prompts: Prompts) -> None:
        params = [
            SamplingParams(
                **SAMPLING,
                max_tokens=settings["max_tokens"],
                extra_args={"hotwire": json.dumps({"id": f"v{i}", "layer": count // 2, "scale": 1.0})},
            )
            for i in range(len(prompts))
        ]
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return {"vectors": vectors}


KINDS = {
    "nnsight-vllm": nnsight,
    "nnsight-taps": partial(nnsight, tapped=True),
    "interp-engine": interp_engine,
    "interp-engine-static": partial(interp_engine, static=True),
    "hotwire": hotwire,
}
