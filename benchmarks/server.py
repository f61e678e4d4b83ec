"""What `insitu serve` costs beside vLLM's own server, and a remote trace beside a local one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import insitu

PROMPT = "The Eiffel Tower is in the city of"
SETTINGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--served-model-name", "model")
PLAIN = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
OURS = (sys.executable, "-m", "insitu.cli", "serve")


class Server:
    def __init__(self, command: tuple[str, ...], folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        full = [*command, folder, *SETTINGS, "--host", "127.0.0.1", "--port", port]
        self.process = subprocess.Popen(
            full, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{' '.join(full)} has ended") from None
                time.sleep(0.5)

    def complete(self, number: int) -> None:
        body = {"model": "model", "prompt": f"{number}: {PROMPT}", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            json.load(answer)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    folder = insitu.demo_model()
    plain, ours = Server(PLAIN, folder), Server(OURS, folder)
    local = insitu.VLLM(folder, dispatch=True, dtype="float32", enforce_eager=True, max_model_len=256)
    remote = insitu.connect(ours.url)
    try:
        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for turn in range(chosen.rounds + 1):
            for name, server in (("plain", plain), ("ours", ours)):
                took = timed(lambda server=server, turn=turn: traffic(server, chosen.requests, turn))
                if turn:
                    seconds[name].append(took)
        base, own = (statistics.median(seconds[name]) for name in ("plain", "ours"))
        print(f"{chosen.requests} completions, 16 at a time: vLLM's server {chosen.requests / base:.1f}/s, ", end="")
        print(f"insitu's {chosen.requests / own:.1f}/s, ratio {base / own:.3f}")
        here, there = (statistics.median(timed(lambda m=m: trace(m)) for _ in range(50)) for m in (local, remote))
        print(f"one trace, one value: local {here * 1e3:.1f} ms, remote {there * 1e3:.1f} ms")
    finally:
        local.close()
        plain.close()
        ours.close()


def traffic(server: Server, count: int, turn: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(server.complete, range(turn * count, (turn + 1) * count)))


def trace(model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = model.resid_post[15].save()
    assert hidden.shape[-1] == 576


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
