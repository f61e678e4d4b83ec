"""How fast large values come from one process to another of the same machine. `python -m benchmarks.home [MiB]`

Written by one thread and by as many as the library takes here, by turns, the median of several rounds: how long the
sender is busy, what the receiver needs to have the tensors, and what it takes to read each page of them once. No engine
is started.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from insitu.wire import Port, memory

ROUNDS = 9
PAUSE = 0.1
"""For the memory of the last round to be taken back."""
_MIB = 2**20


def port() -> Port:
    return Port(lambda obj: None, lambda name: None)


def receive(pipe: Any) -> None:
    """The other process: seconds of opening and of reading."""
    ours = port()
    while message := pipe.recv_bytes():
        took, got = seconds(lambda message=message: ours.unpack(message))
        read, _ = seconds(lambda got=got: [int(each[::4096].sum()) for each in got or ()])
        del got
        pipe.send_bytes(ours.pack((took, read)))


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def main() -> None:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    most = memory.MOST_THREADS
    pipe, other = multiprocessing.Pipe()
    receiver = multiprocessing.Process(target=receive, args=(other,), daemon=True)
    receiver.start()
    ours = port()
    pipe.send_bytes(ours.pack(None))
    ours.unpack(pipe.recv_bytes())
    table = Table("values", "threads", "written", "GB/s", "opened", "read", title="milliseconds")
    for mib in (1, total):
        values = [torch.ones(mib * _MIB, dtype=torch.uint8) for _ in range(total // mib)]
        figures: dict[int, list[tuple[float, ...]]] = {1: [], most: []}
        for _ in range(ROUNDS):
            for threads, kept in figures.items():
                memory.MOST_THREADS = threads
                packed, message = seconds(lambda values=values: ours.pack(values))
                pipe.send_bytes(message)
                kept.append((packed, *ours.unpack(pipe.recv_bytes())))
                time.sleep(PAUSE)
        for threads, kept in figures.items():
            packed, *others = (1000 * median(each) for each in zip(*kept, strict=True))
            used = min(threads, len(os.sched_getaffinity(0)))
            rate = total * _MIB / packed / 1e6
            table.add_row(f"{total // mib} x {mib} MiB", str(used), *(f"{x:.1f}" for x in (packed, rate, *others)))
    pipe.send_bytes(b"")
    receiver.join()
    Console().print(table)


if __name__ == "__main__":
    main()
