"""What `insitu serve` costs plain requests, beside vLLM's own server."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import insitu
from benchmarks.serving import AT_ONCE, OURS, PLAIN, Server

_POLLS_FOR = 1.2
"""vLLM's workers poll for a second after their last message, on the processor that the other server's needs."""
_DRAWS = 4000
"""Samples of the bootstrap."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--model", default=None, help="a folder (default: SmolLM2)")
    parser.add_argument("--requests", type=int, default=64, help="of a burst (default: 64)")
    parser.add_argument("--rounds", type=int, default=20, help="a burst at each server, in either order (default: 20)")
    parser.add_argument(
        "--work",
        action="store_true",
        help="workers in their cores' processes, where none polls: seconds of the processor are work alone",
    )
    parser.add_argument("--same", action="store_true", help="vLLM's server beside itself: what the figures are worth")
    chosen = parser.parse_args()
    folder = chosen.model or insitu.demo_model()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not chosen.work))
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
    cpu: list[list[Mapping[str, float]]] = [[], []]
    number = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(rounds + 1):
            for which in random.sample((0, 1), 2):
                time.sleep(_POLLS_FOR)
                servers[which].traffic(pool, range(number, number := number + AT_ONCE))
                took, used = servers[which].traffic(pool, range(number, number := number + requests))
                if turn:
                    seconds[which].append(took)
                    cpu[which].append({**used, "all": sum(used.values())})
    for name, mine, each in zip(("vLLM's server", "this server"), seconds, cpu, strict=True):
        split = ", ".join(f"{part} {1000 * middle / requests:.2f}" for part, middle in medians(each).items())
        print(f"{name}: {requests / statistics.median(mine):.1f} completions/s; ms of the processor for each: {split}")
    print(f"ratio, requests per second: {spread([a / b for a, b in zip(*seconds, strict=True)])}")
    for part in cpu[0][0]:
        ratios = [plain[part] / ours[part] for plain, ours in zip(*cpu, strict=True)]
        print(f"ratio, seconds of the processor, {part}: {spread(ratios)}")


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}


def spread(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    drawn = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    least, most = drawn[len(drawn) // 40], drawn[-len(drawn) // 40]
    return f"median {middle:.3f} (95% sure: {least:.3f} to {most:.3f}), quartiles {low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
