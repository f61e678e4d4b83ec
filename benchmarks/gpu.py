"""What insitu costs beside plain vLLM with CUDA graphs, on one GPU or several. `python -m benchmarks.gpu`

A model of Llama-8B's shape with random weights, 256 prompts of 128 tokens, 128 generated; what blocks save is handed
to the host. Each case by turns with plain vLLM, whose engine runs in a process of its own, as it does by default.
`VLLM_USE_V2_MODEL_RUNNER=0` takes vLLM's V1 model runner. `--cohorts` has each case twice, by turns: with a run of the
block for each request, and with one for all.

`python -m benchmarks.gpu sweep` has the rows of `python -m benchmarks` instead: 1024 prompts of which a block reads or
edits the prefill, beside plain vLLM, transformers with hooks and other libraries. `python -m benchmarks.gpu peers`: the
work of this table, with 32 tokens generated, by libraries that work inside vLLM.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

LAYER, PROMPTS, TOKENS = 16, 256, 128
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
ENGINE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.3,
}

Batch = list[list[int]]


class Case(NamedTuple):
    """`run(model, prompts)` on an engine with these taps; `target`: its speed over plain vLLM's is to be that, if it is
    not 0."""

    taps: tuple[str, ...]
    target: float
    run: Callable[[Any, Batch], Any]


def as_chosen(run: Callable[[Any, Batch], Any], together: bool, model: Any, prompts: Batch) -> Any:
    from tests.engine.cohorts import run_together

    run_together(model, together)
    return run(model, prompts)


def untraced(model: Any, prompts: Batch) -> Any:
    return generate(model.vllm_entrypoint, prompts)


def prefill(model: Any, prompts: Batch) -> Any:
    return model.run(lambda tracer: model.resid_post[LAYER], prompts, **SAMPLING)


def last_of_every_layer(model: Any, prompts: Batch) -> Any:
    return model.run(lambda tracer: [stream[-1] for stream in model.resid_post], prompts, **SAMPLING)


def every_step(model: Any, prompts: Batch) -> Any:
    return model.run(lambda tracer: [model.resid_post[LAYER] for _ in tracer.iter[:]], prompts, **SAMPLING)


def steer(model: Any, prompts: Batch) -> Any:
    import torch

    vectors = torch.randn(len(prompts), 4096, dtype=torch.bfloat16, device="cuda")
    with model.trace(**SAMPLING) as tracer:
        for prompt, vector in zip(prompts, vectors, strict=True):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    model.resid_post[LAYER] += vector


ONE, ALL = (f"resid_post[{LAYER}]",), ("resid_post",)
CASES = {
    "untraced requests": Case((), 0.99, untraced),
    "every request traced, one layer's prefill saved": Case((), 0.90, prefill),
    "every layer's last prompt token saved": Case((), 0, last_of_every_layer),
    "untraced requests, one tap": Case(ONE, 0.99, untraced),
    "one layer's prefill saved, a tap": Case(ONE, 0.97, prefill),
    "one layer read at every step, a tap": Case(ONE, 0.95, every_step),
    "a vector of its own added to each request at one layer, every step, a tap": Case(ONE, 0.97, steer),
    "every layer's last prompt token saved, 32 taps": Case(ALL, 0.93, last_of_every_layer),
}


def generate(llm: Any, prompts: Batch) -> Any:
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, SamplingParams(**SAMPLING), use_tqdm=False)


def folder_of_shape() -> str:
    from transformers import LlamaConfig

    folder = Path(tempfile.gettempdir()) / "insitu-llama-8b-shape"
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each case; the median counts (default: 5)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that each engine runs on (default: 1)")
    parser.add_argument("--cases", default="", help="only those whose names hold one of these, by `;`")
    parser.add_argument("--cohorts", action="store_true", help="each case with blocks run alone and run together")
    parser.add_argument("--json", default="", help="a file for the figures")
    parser.add_argument("--profile", action="store_true", help="where Python's time goes, one more round of each")
    chosen = parser.parse_args()

    from vllm import LLM

    wanted = [part for part in chosen.cases.split(";") if part]
    cases = {name: case for name, case in CASES.items() if not wanted or any(part in name for part in wanted)}
    folder = folder_of_shape()
    ENGINE["tensor_parallel_size"] = chosen.tensor_parallel
    plain = LLM(folder, **ENGINE)
    generator = random.Random(0)
    prompts = [[generator.randrange(1, 128000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    figures: dict[str, Any] = {}
    for taps in dict.fromkeys(case.taps for case in cases.values()):
        own = {name: case for name, case in cases.items() if case.taps == taps}
        if chosen.cohorts:
            own = {
                f"{name}; blocks {how}": case._replace(run=partial(as_chosen, case.run, how == "together"))
                for name, case in own.items()
                for how in ("alone", "together")
            }
        figures |= measure(plain, folder, taps, own, prompts, chosen.rounds, chosen.profile)
        print(table(figures), flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=1))


def measure(
    plain: Any, folder: str, taps: Sequence[str], cases: dict[str, Case], prompts: Batch, rounds: int, profile: bool
) -> dict[str, Any]:
    """Seconds of each case and of plain vLLM before it, by turns; the first turn is not counted."""
    import insitu

    figures: dict[str, Any] = {}
    start = time.perf_counter()
    with insitu.VLLM(folder, dispatch=True, taps=taps, **ENGINE) as model:
        print(f"engine with taps {taps} up after {time.perf_counter() - start:.0f} s, {model.stats()}", flush=True)
        seconds = {name: ([], []) for name in cases}
        for turn in range(rounds + 1):
            for name, case in cases.items():
                pair = timed(generate, plain, prompts), timed(case.run, model, prompts)
                for kept, one in zip(seconds[name], pair, strict=True):
                    kept.extend([one] if turn else [])
        print(model.stats(), flush=True)
        if profile:
            for name, case in cases.items():
                print(name, flush=True)
                profiler = cProfile.Profile()
                profiler.runcall(case.run, model, prompts)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
        for name, (before, own) in seconds.items():
            ratio = statistics.median(before) / statistics.median(own)
            figures[name] = {"plain": before, "own": own, "ratio": ratio, "target": cases[name].target}
    gc.collect()
    return figures


def timed(run: Callable[[Any, Batch], Any], model: Any, prompts: Batch) -> float:
    gc.collect()
    return seconds_of(partial(run, model, prompts))


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(figures: dict[str, Any]) -> str:
    lines = ["| case | plain vLLM, s | insitu, s | ratio | goal |", "| --- | --- | --- | --- | --- |"]
    for name, one in figures.items():
        plain, own = (
            f"{statistics.median(each):.3f} ({min(each):.3f}-{max(each):.3f})" for each in (one["plain"], one["own"])
        )
        lines.append(f"| {name} | {plain} | {own} | {one['ratio']:.3f} | {one['target']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        from benchmarks.gpu_sweep import sweep

        sweep(sys.argv[2:])
    elif sys.argv[1:2] == ["peers"]:
        from benchmarks.gpu_peers import beside

        beside(sys.argv[2:])
    else:
        main()
