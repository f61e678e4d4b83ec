"""What a real server does with blocks that never end, results that can't travel, crowds, and an engine that dies."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

import insitu
from benchmarks.load import by_an_async_engine, ending
from benchmarks.load import one_value as value_block
from benchmarks.serving import Held, left_over
from tests import models
from tests.engine import served
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import KEY, Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
HASTY, SMALL = "a key with little time", "a key with little room"
MIB = 1 << 20
model, nothing_is_left = served.model, served.nothing_is_left


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hasty = {"name": "hasty", "key": HASTY, "limits": {"seconds": 1.0, "operations": 10**9}}
    file = key_file(tmp_path_factory, hasty, {"name": "small", "key": SMALL, "limits": {"saved_bytes": MIB}})
    made = Server("--api-key", KEY, "--insitu-keys", file)
    yield made
    made.close()


def test_a_block_that_never_ends_is_stopped_and_others_go_on(server: Server, model: Any) -> None:
    hasty = insitu.connect(server.url, HASTY)

    def for_ever(tracer: Any) -> None:
        hasty.resid_post[1]
        while True:
            pass

    def one(number: int) -> Any:
        return model.run(lambda tracer: model.resid_post[2], PROMPT, **GREEDY)

    with ThreadPoolExecutor(9) as pool:
        stuck = pool.submit(hasty.run, for_ever, PROMPT, **GREEDY)
        traced = [pool.submit(one, number) for number in range(4)]
        asked = {"model": "tiny", "prompt": ids_of("llama"), "max_tokens": 4, "temperature": 0}
        plain = [pool.submit(server.post, "/v1/completions", asked) for _ in range(4)]
        with pytest.raises(insitu.LimitError, match=r"1\.0 seconds"):
            stuck.result(60)
        for each in traced:
            assert_close(each.result(60), hf_stream("llama", ids_of("llama")).resid_post[2])
        assert {each.result(60)["usage"]["completion_tokens"] for each in plain} == {4}


@pytest.mark.parametrize(
    ("made", "said"),
    [(lambda hidden: hidden.to_sparse(), "sparse"), (lambda hidden: (each for each in hidden), "generator")],
    ids=["sparse", "generator"],
)
def test_what_can_t_travel_is_an_error_of_its_own_trace_alone(model: Any, made: Any, said: str) -> None:
    def one(number: int) -> Any:
        return model.run(lambda tracer: model.resid_post[2], PROMPT, **GREEDY)

    def odd(tracer: Any) -> Any:
        return made(model.resid_post[2])

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(one, number) for number in range(4)]
        with pytest.raises(insitu.InsituError, match=said):
            model.run(odd, PROMPT, **GREEDY)
        for each in others:
            assert_close(each.result(60), hf_stream("llama", ids_of("llama")).resid_post[2])


def test_results_larger_than_a_key_may_have_are_refused(server: Server, model: Any) -> None:
    small = insitu.connect(server.url, SMALL)
    with pytest.raises(insitu.LimitError, match=f"{MIB} bytes"):
        with small.trace(PROMPT, **GREEDY):
            rows = small.resid_post[0][0, 0].expand(MIB).contiguous().save()
    with small.trace(PROMPT, **GREEDY):
        rows = small.resid_post[0][0, 0].expand(MIB // 8).contiguous().save()
    assert rows.shape == (MIB // 8,)


def test_results_larger_than_a_message_are_an_error_not_a_broken_connection(model: Any) -> None:
    with pytest.raises(insitu.InsituError, match=r"bytes of JSON.*numbers as tensors"):
        with model.trace(PROMPT, **GREEDY):
            model.logits
            numbers: Any = [1234567] * 900_000
            numbers.save()
    with pytest.raises(insitu.LimitError, match="bytes"):
        with model.trace(PROMPT, **GREEDY):
            first = model.resid_post[0][0, 0].expand(63 * MIB).contiguous().save()
            second = model.resid_post[1][0, 0].expand(63 * MIB).contiguous().save()


def test_many_bytes_come_as_they_are(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        large: Any = torch.arange(16 * MIB)
        large.save()
        model.logits
    assert torch.equal(large, torch.arange(16 * MIB))


def test_64_traces_of_which_some_fail(model: Any) -> None:
    def one(number: int) -> Any:
        try:
            return model.run(value_block(model, "fails" if number % 4 == 0 else "ends"), PROMPT, **GREEDY)
        except ZeroDivisionError as error:
            return error

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(one, range(64)))
    assert [type(each) is ZeroDivisionError for each in found] == [number % 4 == 0 for number in range(64)]
    right = [each for each in found if not isinstance(each, ZeroDivisionError)]
    assert all(torch.equal(each, right[0]) for each in right)
    assert_close(right[0], hf_stream("llama", ids_of("llama")).resid_post[2][-1])


@pytest.mark.parametrize("where", ["headers", "half a body", "body"])
def test_a_client_that_is_gone_at_any_moment_leaves_nothing(server: Server, model: Any, where: str) -> None:
    body = b"ISU1" + bytes(1000)
    head = (
        f"POST /insitu/v1/trace HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    )
    sent = {"headers": head.encode(), "half a body": f"{head}\r\n".encode() + body[:500]}
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as made:
            made.sendall(sent.get(where, f"{head}\r\n".encode() + body))
    leaving = insitu.connect(server.url, KEY, timeout=0.05)

    def each_step(tracer: Any) -> None:
        for step in tracer.iter[:]:
            leaving.resid_post[1]

    with pytest.raises(insitu.EngineError, match="timed out"):
        leaving.run(each_step, PROMPT, **LONG)


def test_a_killed_worker_is_an_error_for_all_and_an_unhealthy_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # so that the worker is a process of its own
    server = Server()
    model = insitu.connect(server.url)
    errors: list[BaseException] = []

    def each_step(tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.resid_post[1]

    def traces() -> None:
        try:
            while True:
                model.run(each_step, PROMPT, **LONG)
        except insitu.EngineError as error:
            errors.append(error)

    try:
        threads = [threading.Thread(target=traces) for _ in range(4)]
        for thread in threads:
            thread.start()
        while model.in_flight() < 4:
            time.sleep(0.01)
        family = psutil.Process(server.process.pid).children(recursive=True)
        workers = [one for one in family if "Worker" in " ".join(one.cmdline())]
        assert len(workers) == 1, [one.cmdline() for one in family]
        workers[0].kill()
        for thread in threads:
            thread.join(60)
        assert len(errors) == 4
        assert all("engine" in str(error) and "make a new one" in str(error) for error in errors), errors
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health", timeout=10)
        with pytest.raises(insitu.EngineError, match="engine"):
            model.run(each_step, PROMPT, **LONG)
        server.process.wait(60)  # it ends by itself, so that whoever watches it starts it again
    finally:
        server.close()


def test_after_many_traces_of_which_some_fail_and_some_are_left_nothing_is_held() -> None:
    seen: list[Mapping[str, Held]] = []
    ended, in_flight = by_an_async_engine(models.tiny("llama"), 400, 16, lambda done, held: seen.append(held))
    expected = [ending(number) for number in range(400)]
    assert (ended["fails"], ended["left"] + ended["ends"], in_flight) == (expected.count("fails"), 396, 0)
    assert left_over(seen[0], seen[-1]) == []
