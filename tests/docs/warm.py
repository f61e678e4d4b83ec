"""A process that has imported what pages import and forks a child for each: imports are the most of a page's time.

It reads lines of JSON, each the files of a page, of its result and of what it writes to standard error, and prints
two lines for each: the child's id, and how it ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.docs import pages

IMPORTS = (
    "torch",
    "transformers",
    "insitu.recipes",
    "insitu.engine.client.model",
    "insitu.engine.client.async_model",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
LIMIT = 280


class Warm:
    """Runs pages one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.docs.warm"]
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command, cwd=pages.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, page: Path) -> list[str]:
        """What each block of the page prints."""
        with tempfile.TemporaryDirectory() as folder:
            result, log = Path(folder, "result.json"), Path(folder, "log.txt")
            self._say(str(page), str(result), str(log))
            child = int(self._line())
            killer = threading.Timer(LIMIT, os.killpg, (child, signal.SIGKILL))
            killer.start()
            ended = self._line()
            killer.cancel()
            if ended != "0":
                raise AssertionError(f"{page.name} ended with {ended}: {log.read_text()[-6000:]}")
            return json.loads(result.read_text())

    def _say(self, *files: str) -> None:
        assert self._process.stdin
        print(json.dumps(files), file=self._process.stdin, flush=True)

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the process of the pages has ended with {self._process.wait()}"
        return line.strip()


def main() -> None:
    conftest: Any = importlib.import_module("tests.conftest")  # its settings for vLLM
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "INSITU_CPU_KVCACHE_BYTES": str(2**29)}
    for name in IMPORTS:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads can't be forked"
    conftest.keep_imports()
    for line in sys.stdin:
        page, result, log = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(page, result, log)
            return
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(page: str, result: str, log: str) -> None:
    os.setsid()
    with open(log, "w") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        Path(result).write_text(json.dumps(pages.run_here(Path(page))))
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
