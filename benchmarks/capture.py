"""What capturing a data set costs beside plain vLLM on the same prompts: `python -m benchmarks.capture`."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import SamplingParams, TokensPrompt

import insitu
from insitu.dataset.built import model_for

ENGINE = {"dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--model", default=None, help="default: the demo model")
    parser.add_argument("--at", default="resid_post[15]")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of each, by turns (default: 5)")
    parser.add_argument("--given", action="store_true", help="an engine without taps, as one that is given to capture")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time, on a machine that others use too")
    chosen = parser.parse_args()

    clock = time.process_time if chosen.cpu else time.perf_counter
    start = clock()
    name = chosen.model or insitu.demo_model()
    model = insitu.VLLM(name, **ENGINE) if chosen.given else model_for(name, [chosen.at], ENGINE)
    model.dispatch()
    print(f"engine built in {clock() - start:.1f} s")
    draw = random.Random(0)
    data = [[draw.randrange(1000, 20000) for _ in range(chosen.tokens)] for _ in range(chosen.prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    written = 0

    def plain() -> None:
        model.vllm_entrypoint.generate([TokensPrompt(prompt_token_ids=ids) for ids in data], params, use_tqdm=False)

    def captured() -> None:
        nonlocal written
        folder = Path(tempfile.mkdtemp())
        insitu.capture(model, data, at=chosen.at, out=folder, progress=False)
        written = sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(folder)

    took: dict[Any, list[float]] = {plain: [], captured: []}
    for turn in range(chosen.rounds + 1):
        for work in (plain, captured) if turn % 2 else (captured, plain):
            start = clock()
            work()
            took[work] += [clock() - start] if turn else []
    ratios = [base / cost for base, cost in zip(took[plain], took[captured], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    base, cost = statistics.median(took[plain]), statistics.median(took[captured])
    print(f"{chosen.prompts} prompts of {chosen.tokens} tokens, {chosen.at}: {written / 2**20:.1f} MiB")
    print(f"plain vLLM {base:.3f} s, captured {cost:.3f} s (medians of {chosen.rounds})")
    print(f"ratio, by rounds: median {middle:.3f}, quartiles {low:.3f} and {high:.3f}")
    model.close()


if __name__ == "__main__":
    main()
