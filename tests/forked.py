"""Processes of engines and servers are forked from one that has imported vLLM, which takes each ten seconds otherwise.

They begin as spawned ones do, with nothing of the process that asks for them but its environment, and end as they do.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import context, forkserver, resource_tracker
from pathlib import Path
from typing import Any

IMPORTS = (
    "torch",
    "transformers",
    "insitu.recipes",
    "insitu.engine.client.model",
    "insitu.engine.client.async_model",
    "insitu.engine.server.serve",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


def keep_imports() -> None:
    """What is imported by now stays. An engine's start and its end look four times through all objects that may go,
    half a second each; vLLM itself freezes them while it has an engine, and lets go of all when one ends."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def look_at_models_here() -> None:
    """vLLM looks at a class of models that it has not met on this machine in a process of its own, lest that
    touches a GPU: ten seconds of imports for each of fifty architectures."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()


class _Process(context.ForkServerProcess):
    environment: Mapping[str, str] | None = None

    def start(self) -> None:
        self.environment = dict(self.environment or os.environ)
        super().start()

    def _bootstrap(self, *args: Any, **named: Any) -> int:
        os.environ.clear()
        os.environ.update(self.environment or {})
        return super()._bootstrap(*args, **named)  # type: ignore[misc]


class _Context(context.ForkServerContext):
    Process = _Process


class _Server(forkserver.ForkServer):
    def ensure_running(self) -> None:
        """A process that was forked has its forks made by the same one."""
        if self._forkserver_pid is None and self._forkserver_alive_fd is not None:  # type: ignore[attr-defined]
            resource_tracker.ensure_running()
        else:
            super().ensure_running()


def fork_engines() -> None:
    """From now on, what asks multiprocessing for spawned processes gets forked ones, here and in those."""
    made = _Context()
    made.set_forkserver_preload([*IMPORTS, "tests.forked_from"])
    vars(forkserver)["_forkserver"].__class__ = _Server
    vars(context)["_concrete_contexts"]["spawn"] = made


class Command:
    """``insitu`` with these arguments, in a session of its own, as ``subprocess.Popen`` would have it."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, output: Sequence[str] = ()
    ) -> None:
        """``output``: the files of what it prints and of what it writes to standard error."""
        self._process = _Process(target=_run, args=(list(arguments), list(output)))
        self._process.environment = environment
        self._process.start()
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("insitu", timeout or 0)
        return self._process.exitcode


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``insitu`` with these arguments, when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "error")]
        process = Command(arguments, output=list(map(str, files)))
        try:
            code = process.wait(280)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))


def _run(arguments: list[str], output: list[str]) -> None:
    os.setsid()
    for number, file in enumerate(output, 1):
        with open(file, "w") as opened:
            os.dup2(opened.fileno(), number)
    known = vars(context)["_concrete_contexts"]
    known["spawn"] = known["fork"]  # so that its processes are of its session
    main: Any = importlib.import_module("insitu.cli").main
    sys.exit(main(arguments))
