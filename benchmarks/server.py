"""What `insitu serve` costs plain requests, beside vLLM's own server."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import insitu
from benchmarks.serving import AT_ONCE, OURS, PLAIN, Server

_POLLS_FOR = 1.2
"""vLLM's workers poll for a second after their last message, on the processor that the other server's needs."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--model", default=None, help="a folder (default: SmolLM2)")
    parser.add_argument("--requests", type=int, default=64, help="of a burst (default: 64)")
    parser.add_argument("--rounds", type=int, default=20, help="a burst at each server, in either order (default: 20)")
    parser.add_argument("--same", action="store_true", help="vLLM's server beside itself: what the figures are worth")
    chosen = parser.parse_args()
    folder = chosen.model or insitu.demo_model()
    servers: list[Server] = []
    try:
        for command in (PLAIN, PLAIN if chosen.same else OURS):
            servers.append(Server(command, folder))
        compare(servers, chosen.requests, chosen.rounds)
    finally:
        for server in servers:
            server.close()


def compare(servers: Sequence[Server], requests: int, rounds: int) -> None:
    seconds: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    parts: list[Counter[str]] = [Counter(), Counter()]
    number = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(rounds + 1):
            for which in random.sample((0, 1), 2):
                time.sleep(_POLLS_FOR)
                servers[which].traffic(pool, range(number, number := number + AT_ONCE))
                took, used = servers[which].traffic(pool, range(number, number := number + requests))
                if turn:
                    seconds[which].append(took)
                    cpu[which].append(sum(used.values()))
                    parts[which].update(used)
    for name, mine, each in zip(("vLLM's server", "this server"), seconds, parts, strict=True):
        split = ", ".join(f"{part} {1000 * used / rounds / requests:.2f}" for part, used in each.items())
        print(f"{name}: {requests / statistics.median(mine):.1f} completions/s; ms of the processor for each: {split}")
    print(f"ratio, requests per second: {spread([a / b for a, b in zip(*seconds, strict=True)])}")
    print(f"ratio, seconds of the processor: {spread([a / b for a, b in zip(*cpu, strict=True)])}")


def spread(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"median {middle:.3f}, quartiles {low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
