"""What insitu costs on the CPU beside plain vLLM, transformers with hooks, and other libraries. Run by `make bench`.

All by turns and in the same run, those without vLLM in processes of their own: medians of the rounds, with the least
and the largest. nnsight and vllm-lens are run by interpreters that have them, if they are given: `python -m venv
peers`, `peers/bin/pip install nnsight==0.8.1 torch transformers`, then `--nnsight peers/bin/python`.
"""

from __future__ import annotations

import gc
import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the threads of those whose turn it is not would spin

from vllm import LLM

import insitu
from benchmarks import growth
from benchmarks.comparison import compared, started, vocabulary_of
from benchmarks.report import arguments, peers_of, write_down
from benchmarks.sweep import cases, plain_of

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 1024}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--growth", type=int, nargs="*", default=[1, 16, 64, 256, 1024, 4096], help="numbers of requests"
    )
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    curves: dict[str, growth.Curve] = {}
    if chosen.prompts:
        folder, engine = insitu.demo_model(), {**ENGINE, "enforce_eager": chosen.eager}
        settings = {"engine": engine, "device": "cpu", "dtype": "float32"}
        plain = LLM(folder, **engine)
        with insitu.VLLM(folder, dispatch=True, **engine) as model:
            others = started(peers_of(chosen), folder, settings)
            rows = compared(plain_of(plain), cases(model), vocabulary_of(model), others, chosen)
        del plain
        gc.collect()
    if chosen.growth:
        curves = grown(chosen.growth, chosen.rounds)
    write_down(chosen.out, rows, curves, "cpu")


def grown(counts: list[int], rounds: int) -> dict[str, growth.Curve]:
    from tests import models

    engine = {**ENGINE, "enforce_eager": True, "max_num_batched_tokens": 8192}
    with insitu.VLLM(models.tiny("llama"), dispatch=True, **engine) as model:
        return {
            "requests together": growth.requests(model, counts, rounds),
            "places": growth.places(model, rounds),
            "tokens of a prompt": growth.tokens(model, (8, 16, 32, 64, 128, 240), rounds),
            "bytes saved a request": growth.saved_bytes(model, 240, rounds),
        }


if __name__ == "__main__":
    main()
