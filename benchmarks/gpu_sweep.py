"""Many prompts of which a block reads or edits the prefill, on one GPU: `python -m benchmarks.gpu sweep`."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm import LLM

import insitu
from benchmarks.comparison import compared, started, vocabulary_of
from benchmarks.gpu import ENGINE, TOKENS, folder_of_shape, seconds_of
from benchmarks.report import PEERS, arguments, peers_of, write_down
from benchmarks.sweep import GREEDY, cases, plain_of


def sweep(argv: Sequence[str]) -> None:
    parser = arguments(__doc__, peers=(*PEERS, "nnsight-vllm"), prompts=1024, tokens=TOKENS)
    parser.add_argument("--model", default="", help="a folder (default: random weights of Llama-8B's shape)")
    parser.add_argument("--device", default="cuda", help="of transformers; the engines run where vLLM's build does")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--taps", nargs="*", default=[], help="places that insitu's compiled model serves itself")
    parser.add_argument("--max-model-len", type=int, default=ENGINE["max_model_len"])
    chosen = parser.parse_args(argv)
    folder = chosen.model or folder_of_shape()
    engine = {**ENGINE, "max_num_seqs": chosen.prompts, "enforce_eager": chosen.eager, "gpu_memory_utilization": 0.25}
    engine |= {"dtype": chosen.dtype, "max_model_len": chosen.max_model_len}
    settings = {"engine": engine, "device": chosen.device, "dtype": chosen.dtype, "max_tokens": 1}
    plain = LLM(folder, **engine)
    with insitu.VLLM(folder, taps=chosen.taps, dispatch=True, **engine) as model:
        others = started(peers_of(chosen), folder, settings)
        rows = compared(plain_of(plain), cases(model), vocabulary_of(model), others, chosen)
        print(f"{to_the_host(model, rows, chosen)}\n{one_alone(plain, model, chosen.tokens)}\n", flush=True)
    write_down(chosen.out, rows, {}, "wall")


def to_the_host(model: Any, rows: Sequence[Any], chosen: argparse.Namespace) -> str:
    """How fast every layer whole came home, beside what a copy into pinned memory reaches."""
    whole = {row["system"]: row["wall"][0] for row in rows if row["work"] == "every layer saved" and "wall" in row}
    if not whole or chosen.device != "cuda":
        return ""
    here = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here, device="cpu", pin_memory=True)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()

    config = model.vllm_entrypoint.model_config
    count = chosen.prompts * chosen.tokens * config.get_hidden_size() * config.dtype.itemsize * len(model.resid_post)
    rate = 2**30 / min(seconds_of(copy) for _ in range(5))
    longer = whole["insitu"] - whole["plain vLLM"]
    return (
        f"every layer whole: {count / 1e9:.1f} GB in {whole['insitu']:.2f} s, {longer:.2f} s longer than without; "
        f"a copy into pinned memory moves {rate / 1e9:.1f} GB/s, so that many in {count / rate:.2f} s"
    )


def one_alone(plain: Any, model: Any, tokens: int, rounds: int = 100) -> str:
    """What a trace adds to one prompt by itself."""
    base, generator, middle = plain_of(plain), random.Random(0), len(model.resid_post) // 2
    here = plain_of(model.vllm_entrypoint)  # vLLM's `LLM` on insitu's engine, which is in this process
    found: dict[str, list[float]] = {"plain": [], "untraced": [], "traced": []}
    vocabulary = vocabulary_of(model)
    for turn in range(rounds + 10):
        prompts = [[generator.randrange(4, vocabulary - 4) for _ in range(tokens)]]
        works = {
            "plain": partial(base, prompts),
            "untraced": partial(here, prompts),
            "traced": lambda prompts=prompts: model.run(lambda tracer: model.resid_post[middle], prompts, **GREEDY),
        }
        for name, work in works.items():
            found[name] += [seconds_of(work)] if turn >= 10 else []
    added = [after - before for before, after in zip(found["untraced"], found["traced"], strict=True)]
    found["traced adds to untraced, by pairs,"] = added
    quartiles = {name: statistics.quantiles(taken, n=4) for name, taken in found.items()}
    parts = (f"{name} {q[1] * 1e3:.2f} ms ({q[0] * 1e3:.2f} to {q[2] * 1e3:.2f})" for name, q in quartiles.items())
    return f"one prompt of {tokens} tokens by itself, medians and quartiles: {', '.join(parts)}"
