"""How much may be in flight under a key, by whichever route it is asked."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.helpers import PROMPT
from tests.engine.served import Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
ONE_KEY = "one at a time for this"
LAST = {"do": "read", "at": "resid_post[2]", "as": "rows", "positions": "last"}
FORM = {"actions": [LAST]}
SETTINGS = {"max_tokens": 100, "temperature": 0.0}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "form": ("/insitu/v1/form", {"prompt": PROMPT, "form": FORM, "sampling": {**SETTINGS, "ignore_eos": True}}),
    "completion": ("/v1/completions", {"prompt": PROMPT, "insitu": FORM, "ignore_eos": True, **SETTINGS}),
    "stream": ("/v1/completions", {"prompt": PROMPT, "insitu": FORM, "ignore_eos": True, "stream": True, **SETTINGS}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server("--insitu-keys", key_file(tmp_path_factory, {"name": "one", "key": ONE_KEY, "limits": {"traces": 1}}))
    yield made
    made.close()


def opened(server: Server, route: str, data: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {ONE_KEY}", "Content-Type": "application/json"}
    return urllib.request.urlopen(
        urllib.request.Request(server.url + route, json.dumps(data).encode(), headers), timeout=60
    )


def status(server: Server, route: str, data: dict[str, Any]) -> int:
    try:
        with opened(server, route, data) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("name", ROUTES)
def test_no_more_run_under_a_key_than_may(server: Server, name: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: status(server, *ROUTES[name]), range(8)))
    assert set(found) == {200, 429}
    assert status(server, *ROUTES[name]) == 200


def test_a_stream_that_its_client_leaves_gives_its_room_back(server: Server) -> None:
    answer = opened(server, *ROUTES["stream"])
    answer.readline()
    assert status(server, *ROUTES["form"]) == 429
    answer.close()
    end = time.monotonic() + 20
    while (found := status(server, *ROUTES["form"])) == 429 and time.monotonic() < end:
        time.sleep(0.1)
    assert found == 200


def test_a_body_that_is_on_its_way_has_its_room(server: Server) -> None:
    lines = ("POST /insitu/v1/trace HTTP/1.1", "Host: h", f"Authorization: Bearer {ONE_KEY}", "Content-Length: 9")
    head = "\r\n".join(lines) + "\r\n\r\n"
    first, second = (socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(2))
    with first, second:
        first.sendall(head.encode())
        time.sleep(0.5)
        second.sendall(head.encode() + b"123456789")
        assert second.recv(100).startswith(b"HTTP/1.1 429")
        first.sendall(b"123456789")
        assert first.recv(100).startswith(b"HTTP/1.1 400")
    assert status(server, *ROUTES["form"]) == 200
