"""A server in a process of its own, and the traffic that the benchmarks send to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil

PROMPT = "The Eiffel Tower is in the city of"
SETTINGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--served-model-name", "model")
PLAIN = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
OURS = (sys.executable, "-m", "insitu.cli", "serve")
AT_ONCE = 16


class Held(NamedTuple):
    """What a process holds of the machine: MiB of memory, and counts."""

    resident: float
    files: int
    connections: int
    threads: int
    segments: int
    """Mappings of shared memory."""


class Server:
    """Started by a ``command`` such as ``PLAIN`` or ``OURS``. Its processes end with ``close``."""

    def __init__(self, command: tuple[str, ...], folder: str, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        full = [*command, folder, *SETTINGS, *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            full, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise SystemExit(f"{' '.join(full)} has ended")
            time.sleep(0.5)
        self._parts = by_part(psutil.Process(self.process.pid))

    def is_healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def cpu(self) -> dict[str, float]:
        """Seconds of the processor that each process has had."""
        return {name: sum(one.cpu_times()[:2]) for name, one in self._parts.items()}

    def held(self) -> dict[str, Held]:
        return {name: held(one) for name, one in self._parts.items()}

    def held_without_clients(self) -> dict[str, Held]:
        """Once it has closed the connections that they keep, which it does after 5 seconds; after 30 in any case."""
        until = time.monotonic() + 30
        while self._has_clients() and time.monotonic() < until:
            time.sleep(0.2)
        return self.held()

    def _has_clients(self) -> bool:
        every = self._parts["api"].net_connections("tcp")
        return any(one.laddr.port == self.port and one.status != psutil.CONN_LISTEN for one in every)

    def complete(self, number: int) -> None:
        """One completion of eight tokens."""
        body = {"model": "model", "prompt": f"{number}: {PROMPT}", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            json.load(answer)

    def traffic(self, pool: ThreadPoolExecutor, numbers: Iterable[int]) -> tuple[float, Mapping[str, float]]:
        """Completions of these numbers: seconds, and seconds of the processor."""
        before, start = self.cpu(), time.perf_counter()
        list(pool.map(self.complete, numbers))
        took, after = time.perf_counter() - start, self.cpu()
        return took, {name: after[name] - before[name] for name in before}

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def by_part(process: psutil.Process) -> dict[str, psutil.Process]:
    """A process with an async engine, and the engine's own: ``api``, ``core`` and ``worker``."""
    found = {"api": process}
    for one in process.children(recursive=True):
        name = " ".join(one.cmdline())
        found |= {part: one for part, said in (("core", "EngineCore"), ("worker", "Worker")) if said in name}
    return found


def held(process: psutil.Process) -> Held:
    with process.oneshot():
        shared = [one for one in process.memory_maps(grouped=False) if one.path.startswith(("/dev/shm/", "/memfd:"))]
        resident, files = process.memory_info().rss / 2**20, process.num_fds()
        return Held(resident, files, len(process.net_connections("tcp")), process.num_threads(), len(shared))


def left_over(before: Mapping[str, Held], after: Mapping[str, Held]) -> list[str]:
    """What the processes hold more than they did, memory of their own left out: ``"api: files 30, now 46"``."""
    return [
        f"{part}: {name} {getattr(before[part], name)}, now {getattr(now, name)}"
        for part, now in after.items()
        for name in Held._fields[1:]
        if getattr(now, name) > getattr(before[part], name)
    ]
