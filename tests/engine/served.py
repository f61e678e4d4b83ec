"""A server in a process of its own, for tests: the model at it, and what is to be left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest

import insitu
from benchmarks.load import settled
from tests import models

KEY = "a key for the tests"
ANN, BEN = "the key of ann", "the key of ben"


INSITU = (sys.executable, "-m", "insitu.cli", "serve")


class Server:
    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = INSITU,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--served-model-name", "tiny")
        settings += ("--kv-cache-memory-bytes", str(2**28))
        whole = [*command, folder or models.tiny("llama"), *settings, *arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(whole, start_new_session=True, env=environment)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        for _ in range(1200):
            assert self.process.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    def post(self, route: str, data: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + route, json.dumps(data).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def key_file(folders: pytest.TempPathFactory, *keys: dict[str, Any]) -> str:
    """A file of these keys, for ``--insitu-keys``."""
    file = folders.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(keys))
    return str(file)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--api-key", KEY)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(server: Server) -> Any:
    return insitu.connect(server.url, KEY)


@pytest.fixture(scope="module")
def ann(server: Server) -> Any:
    """The model to a holder of a key of the server's file; as ``ben``, and ``client`` of vLLM's own routes."""
    return insitu.connect(server.url, ANN)


@pytest.fixture(scope="module")
def ben(server: Server) -> Any:
    return insitu.connect(server.url, BEN)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test at the ``model`` it has no edits, and nothing is held for any request."""
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        model.clear_edits()
        assert settled(model.in_flight) == 0
