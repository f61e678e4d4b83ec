"""A real server process: OpenAI's routes, and traces from clients without vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import insitu
from insitu.net import CONTENT_TYPE
from tests import models
from tests.engine import served
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY = {"temperature": 0.0, "max_tokens": 1}
server, model = served.server, served.model


def test_openai_s_routes_work_and_plain_traffic_is_not_touched(server: Server) -> None:
    asked = {"model": "tiny", "prompt": ids_of("llama"), "max_tokens": 4, "temperature": 0}
    first, again = (server.post("/v1/completions", asked)["choices"][0]["text"] for _ in range(2))
    assert first == again
    with urllib.request.urlopen(f"{server.url}/metrics") as metrics:
        assert b"vllm:" in metrics.read()


def test_values_equal_transformers(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        hidden = model.resid_post[2].save()
        result = tracer.result.save()
    assert isinstance(hidden, torch.Tensor)
    assert_close(hidden, hf_stream("llama", ids_of("llama")).resid_post[2])
    assert list(result.prompt_token_ids) == ids_of("llama")
    hidden += 1


def test_writes_invokes_and_lists(model: Any) -> None:
    rows: list[Any] = []
    with model.trace(**GREEDY) as tracer:
        for prompt in (PROMPT, "Water boils at"):
            with tracer.invoke(prompt):
                model.resid_post[0][:] = 0
                zeroed = model.resid_post[0].save()
    assert [each.abs().sum().item() for each in zeroed] == [0, 0]
    with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
        for step in tracer.iter[:]:
            rows.append(model.logits.argmax(-1).item())
        rows.save()
    assert len(rows) == 3


def test_one_trace_at_a_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    model = insitu.VLLM("not loaded")
    with model.trace(PROMPT, serve=server.url, **GREEDY):
        hidden = model.resid_post[2].save()
    assert not model.dispatched
    assert_close(hidden, hf_stream("llama", ids_of("llama")).resid_post[2])


def test_function_form(model: Any) -> None:
    scale = 2.0

    def block(tracer: Any) -> Any:
        return model.resid_post[1] * scale

    one, two = model.run(block, [PROMPT, "Water boils at"], **GREEDY)
    assert_close(one / 2, hf_stream("llama", ids_of("llama")).resid_post[1])
    assert two.shape[-1] == models.WIDTH


def test_the_model_is_known(model: Any) -> None:
    assert (len(model.resid_post), len(model.model.layers), model.about["layers"]) == (4, 4, 4)
    assert "LlamaDecoderLayer" in repr(model)
    assert list(model.tokenizer(PROMPT)["input_ids"]) == ids_of("llama")
    assert len(model.positions_of("Tower", PROMPT)) > 0
    assert model.in_flight() == 0
    with pytest.raises(insitu.UnknownModuleError):
        model.model.layrs


def test_errors_are_the_block_s_own_with_its_lines(model: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT, **GREEDY):
            model.logits
            1 / 0
    lines = []
    at = caught.value.__traceback__
    while at is not None:
        lines.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    assert {file.removeprefix("<client>") for file, _ in lines} == {__file__}
    with pytest.raises(insitu.PromptError, match="empty"):
        with model.trace("", **GREEDY):
            logits = model.logits.save()
    with pytest.raises(insitu.ArgumentError, match="temprature"):
        with model.trace(PROMPT, temprature=0):
            logits = model.logits.save()
    assert model.in_flight() == 0


def test_what_is_not_in_the_list_is_refused(model: Any) -> None:
    with pytest.raises(insitu.NotAllowedError, match="open"):
        with model.trace(PROMPT, **GREEDY):
            text = open("/etc/passwd").read().save()  # noqa: SIM115


def test_two_clients_and_many_traces_at_once(server: Server) -> None:
    clients = [insitu.connect(server.url, KEY) for _ in range(2)]

    def one(number: int) -> Any:
        client = insitu.connect(server.url, KEY) if number % 8 == 0 else clients[number % 2]
        return client.run(lambda tracer: client.resid_post[2], PROMPT, **GREEDY)

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(one, range(64)))
    assert all(torch.equal(each, found[0]) for each in found)
    assert clients[0].in_flight() == 0


def test_a_client_that_dies_frees_what_it_held(server: Server, model: Any) -> None:
    code = (
        "import insitu, sys\n"
        "model = insitu.connect(sys.argv[1], sys.argv[2])\n"
        "def block(tracer):\n"
        "    for step in tracer.iter[:]:\n"
        "        hidden = model.resid_post[1]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    model.run(block, 'x', max_tokens=200, ignore_eos=True)\n"
    )
    file = os.path.join(models.tiny("llama"), "dying.py")
    with open(file, "w") as text:
        text.write(code)
    client = subprocess.Popen([sys.executable, file, server.url, KEY], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    while model.in_flight() == 0:
        time.sleep(0.01)
    client.kill()
    client.wait()
    client.stdout.close()
    os.unlink(file)
    for _ in range(100):
        if model.in_flight() == 0:
            break
        time.sleep(0.05)
    assert model.in_flight() == 0


@pytest.mark.parametrize(
    ("key", "way_out"), [(None, "give it to .*api_key=KEY"), ("another", "none of its own"), ("", "none of its own")]
)
def test_without_the_key_nothing_is_told(server: Server, key: str | None, way_out: str) -> None:
    with pytest.raises(insitu.EngineError, match=f"answered 401: this server asks for a key: .*{way_out}"):
        insitu.connect(server.url, key)


@pytest.mark.parametrize("body", [b"", b"{}", b"ISU1", b"\x80\x04N."])
def test_what_is_no_request_is_refused(server: Server, body: bytes) -> None:
    headers = {"Content-Type": CONTENT_TYPE, "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{server.url}/insitu/v1/trace", body, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    assert "error" in json.load(caught.value)


def test_a_server_that_is_not_there_says_so() -> None:
    with pytest.raises(insitu.EngineError, match="can't be reached"):
        insitu.connect("http://127.0.0.1:9")
    with pytest.raises(insitu.ArgumentError, match="begins with http"):
        insitu.connect("file:///etc/passwd")
    with pytest.raises(insitu.ArgumentError, match="begins with http"):
        insitu.VLLM("x").trace(PROMPT, serve="url")


def test_the_client_loads_no_vllm(server: Server) -> None:
    code = (
        "import sys, insitu\n"
        f"model = insitu.connect({server.url!r}, {KEY!r})\n"
        "print(len(model.resid_post), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["4", "False"], done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_an_address_for_others_needs_a_key(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    from insitu.cli import main

    assert main(["serve", "x", "--host", host]) == 2
    assert "Give --api-key KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-server-count", "2"], "--api-server-count 2: .* give --api-server-count 1"),
        (["--headless"], "`headless`: .* behind one front"),
        (["--data-parallel-size", "2", "--data-parallel-rank", "1"], "`data_parallel_rank`: .* behind one front"),
        (["--data-parallel-size", "4", "--data-parallel-hybrid-lb"], "`data_parallel_hybrid_lb`: .* behind one front"),
    ],
)
def test_several_fronts_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from insitu.cli import main

    assert main(["serve", models.tiny("llama"), *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_killed_engine_is_an_error_and_an_unhealthy_server() -> None:
    server = Server()
    model = insitu.connect(server.url)
    errors: list[BaseException] = []

    def block(tracer: Any) -> None:
        for step in tracer.iter[:]:
            hidden = model.resid_post[1]

    def trace() -> None:
        try:
            while True:
                model.run(block, PROMPT, max_tokens=200, ignore_eos=True)
        except insitu.EngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=trace) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    import psutil

    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has ended with the one before
            if "EngineCore" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline()):
                child.kill()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/health", timeout=10)
    server.close()
