"""The JSON form at a real server, and what its keys may do."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from insitu.engine.server.serve import parsed
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import KEY, Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
FORM_KEY, SHORT_KEY = "only forms for this", "short of everything"
READ = {"do": "read", "at": "resid_post[2]", "as": "rows"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys: list[dict[str, Any]] = [
        {"name": "forms", "key": FORM_KEY, "permission": "form"},
        {"name": "short", "key": SHORT_KEY, "limits": {"saved_bytes": 1000, "seconds": 2, "traces": 1}},
    ]
    made = Server("--api-key", KEY, "--insitu-keys", key_file(tmp_path_factory, *keys))
    yield made
    made.close()


def asked(server: Server, data: Any, key: str = FORM_KEY) -> tuple[int, Any]:
    """Status and answer."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(f"{server.url}/insitu/v1/form", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def form(*actions: Any, prompt: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"prompt": prompt, "form": {"actions": list(actions)}, "sampling": {"temperature": 0.0, **sampling}}


def test_a_form_reads_what_transformers_computes(server: Server) -> None:
    status, found = asked(server, form(READ, max_tokens=2, ignore_eos=True))
    assert status == 200
    assert_close(torch.tensor(found["saves"]["rows"]), hf_stream("llama", ids_of("llama")).resid_post[2])
    assert found["prompt_token_ids"] == ids_of("llama")
    assert found["token_ids"] == models.greedy(models.tiny("llama"), ids_of("llama"), 2)


def test_a_form_edits_as_its_block_does(server: Server) -> None:
    vector = torch.linspace(-1, 2, 128)
    add = {"do": "add", "at": "resid_post[1]", "vector": vector.tolist(), "scale": 3.0, "when": "all"}
    logits = {"do": "read", "at": "logits", "as": "logits", "when": "all"}
    status, found = asked(server, form(add, logits, max_tokens=2, ignore_eos=True))
    assert status == 200
    model = insitu.connect(server.url, KEY)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        wanted = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:]:
            model.resid_post[1][:] += 3.0 * vector
            wanted.append(model.logits.clone())
    for mine, theirs in zip(found["saves"]["logits"], wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"{", "malformed", "no JSON"),
        ({**form(READ), "extra": 1}, "invalid", "extra"),
        (form(READ, extra_args={"insitu": {}}), "invalid", "extra_args"),
        (form({**READ, "wen": "all"}), "unknown-key", "wen"),
        (form({**READ, "at": "resid_post[99]"}), "unknown-place", r"actions\[0\]"),
        (form({"do": "add", "at": "resid_post[1]", "vector": [1.0, 2.0]}), None, "128"),
        (form(READ, prompt=""), "PromptError", "empty"),
        (form(READ, max_tokens=-1), None, "max_tokens"),
        ({**form(READ), "edits": ["nobody's"]}, "ArgumentError", "nobody's"),
    ],
)
def test_what_a_form_can_t_do_is_told_by_a_code(server: Server, data: Any, code: str | None, text: str) -> None:
    status, error = asked(server, data)
    assert status == 400
    assert code in (None, error["code"])
    assert insitu.connect(server.url, KEY).in_flight() == 0
    assert re.search(text, error["message"])


def test_keys_may_do_what_they_may(server: Server) -> None:
    assert asked(server, form(READ), "nobody")[1]["code"] == "no-key"
    model = insitu.connect(server.url, FORM_KEY)
    with pytest.raises(insitu.InsituError, match="JSON form alone"):
        model.run(lambda tracer: 1, PROMPT)
    with pytest.raises(insitu.InsituError, match="1000 bytes"):
        short = insitu.connect(server.url, SHORT_KEY)
        short.run(lambda tracer: short.resid_post[0], PROMPT)
    assert asked(server, form(READ), SHORT_KEY)[0] == 400


def test_no_more_run_under_a_key_than_may(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        long = form({**READ, "positions": "last"}, max_tokens=100, ignore_eos=True)
        found = list(pool.map(lambda _: asked(server, long, SHORT_KEY), range(8)))
    assert {status for status, _ in found} == {200, 429}
    assert asked(server, long, SHORT_KEY)[0] == 200


def test_the_schema_is_given(server: Server) -> None:
    request = urllib.request.Request(f"{server.url}/insitu/v1/form", headers={"Authorization": f"Bearer {FORM_KEY}"})
    with urllib.request.urlopen(request) as answer:
        assert "Form" in json.dumps(json.load(answer))


@pytest.mark.parametrize("extra", [{"permission": "trusted"}])
def test_keys_for_what_the_server_does_not_do_are_refused(
    tmp_path: Path, extra: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "lab", "key": "long enough", **extra}]))
    arguments = [models.tiny("llama"), "--insitu-keys", str(file)]
    with pytest.raises(insitu.ArgumentError, match="'lab'"):
        parsed(arguments)
    parsed([*arguments, "--trust-code"])
    assert "can run any code" in capsys.readouterr().err
