"""Forms in OpenAI's own calls, at a real server, asked by the ``openai`` client."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
READ = {"do": "read", "at": "resid_post[2]", "as": "rows"}
LAST = {"do": "read", "at": "resid_post[1]", "as": "last", "positions": "last", "when": "all"}
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
CHAT = [{"role": "user", "content": "Hello there"}]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("chat") / "template.jinja"
    file.write_text(TEMPLATE)
    made = Server("--api-key", KEY, "--chat-template", str(file))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def beside(*actions: Any, **further: Any) -> dict[str, Any]:
    return {"insitu": {"actions": list(actions), **further}}


def test_a_completion_brings_what_its_form_read(client: Any) -> None:
    answer = client.completions.create(prompt=PROMPT, max_tokens=2, extra_body=beside(READ), **GREEDY)
    rows = torch.tensor(answer.choices[0].insitu["saves"]["rows"])
    assert_close(rows, hf_stream("llama", ids_of("llama")).resid_post[2])


def test_each_prompt_and_each_sequence_has_its_own(client: Any) -> None:
    prompts = [ids_of("llama"), ids_of("llama")[:3]]
    answer = client.completions.create(
        prompt=prompts, model="tiny", max_tokens=2, n=2, temperature=1.0, seed=3, extra_body=beside(READ)
    )
    for choice, ids in zip(answer.choices, [each for each in prompts for _ in range(2)], strict=True):
        assert_close(torch.tensor(choice.insitu["saves"]["rows"]), hf_stream("llama", ids).resid_post[2])


def test_a_chat_is_edited_as_its_form_says(client: Any, server: Server) -> None:
    vector = torch.linspace(-1, 2, 128)
    add = {"do": "add", "at": "resid_post[1]", "vector": vector.tolist(), "scale": 30.0, "when": "all"}
    settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "extra_body": {"ignore_eos": True}, **GREEDY}
    plain = client.chat.completions.create(**settings)
    settings["extra_body"] = {"ignore_eos": True, **beside(add, LAST)}
    answer = client.chat.completions.create(**settings)
    model = insitu.connect(server.url, KEY)
    text = "user: Hello there\nassistant:"
    with model.trace(text, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.resid_post[1][:] += 30.0 * vector
        result = tracer.result.save()
    assert answer.choices[0].message.content == result.outputs[0].text != plain.choices[0].message.content
    assert len(answer.choices[0].insitu["saves"]["last"]) == 6
    assert not hasattr(plain.choices[0], "insitu")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_ends_with_what_was_read(client: Any, chat: bool, n: int) -> None:
    settings: dict[str, Any] = {**GREEDY, "max_tokens": 4, "n": n, "stream": True}
    settings |= {"temperature": 1.0, "seed": 1, "stream_options": {"include_usage": True}}
    settings["extra_body"] = {"ignore_eos": True, **beside(LAST)}
    stream = (
        client.chat.completions.create(messages=CHAT, **settings)
        if chat
        else client.completions.create(prompt=PROMPT, **settings)
    )
    saves = {}
    for chunk in stream:
        for choice in chunk.choices:
            if hasattr(choice, "insitu"):
                saves[choice.index] = choice.insitu["saves"]
    assert sorted(saves) == list(range(n))
    assert all(torch.tensor(each["last"]).shape == (4, 1, 128) for each in saves.values())


def refused(call: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value.status_code, caught.value.response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "code", "where"),
    [
        ({"actions": [{**READ, "wen": 1}]}, "unknown-key", "insitu.actions[0]"),
        ({"actions": [{**READ, "at": "resid_post[99]"}]}, "unknown-place", "insitu.actions[0].at"),
        ({"action": []}, "unknown-key", "insitu"),
        ({"actions": 3}, "invalid", "insitu"),
        ([], "invalid", "insitu"),
        ("x", "invalid", "insitu"),
        ({"actions": [READ], "edits": ["nobody's"]}, "ArgumentError", "insitu"),
    ],
)
def test_what_is_no_form_is_refused_before_anything_runs(
    client: Any, stream: bool, field: Any, code: str, where: str
) -> None:
    status, error = refused(
        lambda: client.completions.create(prompt=PROMPT, stream=stream, extra_body={"insitu": field}, **GREEDY)
    )
    assert (status, error["type"], error["param"]) == (400, code, where)


def test_what_can_t_be_done_at_this_prompt_is_an_error_object(client: Any) -> None:
    wrong = beside({"do": "read", "at": "embed", "as": "x", "positions": [900]})
    status, error = refused(lambda: client.completions.create(prompt=PROMPT, extra_body=wrong, **GREEDY))
    assert (status, error["type"], error["param"]) == (400, "bad-positions", "insitu.actions[0].positions")
    with pytest.raises(openai.APIError, match="position 900"):
        list(client.completions.create(prompt=PROMPT, stream=True, extra_body=wrong, **GREEDY))
    searching = {**beside(READ), "use_beam_search": True}
    assert refused(lambda: client.completions.create(prompt=PROMPT, n=2, extra_body=searching, **GREEDY))[0] == 400


@pytest.mark.parametrize(
    ("route", "data"),
    [
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
        ("/invocations", {"prompt": PROMPT}),
        ("/v1/completions/render", {"prompt": PROMPT}),
    ],
)
def test_other_routes_refuse_a_form_by_name(server: Server, route: str, data: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(route, {"model": "tiny", **data, **beside(READ)})
    assert caught.value.code == 400
    assert f"{route} can't do a form" in json.load(caught.value)["error"]["message"]


def test_a_form_s_key_written_with_an_escape_is_refused_too(server: Server) -> None:
    body = json.dumps({"model": "tiny", "messages": CHAT, "max_tokens": 2, **beside(READ)})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    escaped = body.replace('"insitu"', '"\\u0069nsitu"').encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/messages", escaped, headers))
    assert "can't do a form" in json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "encoding"), [("Application/JSON", "utf-8"), ("application/json", "utf-16"), ("a/b+json", "utf-32")]
)
def test_a_form_is_found_in_json_of_every_name_and_encoding(server: Server, kind: str, encoding: str) -> None:
    body = json.dumps({"model": "tiny", "input": PROMPT, **beside(READ)}).encode(encoding)
    headers = {"Content-Type": kind, "Authorization": f"Bearer {KEY}"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/responses", body, headers))
    assert "can't do a form" in json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("route", "text"),
    [
        ("/v1/completions", '"model": "tiny", "prompt": "Hi", "insitu": {"actions": []}, "insitu": '),
        ("/v1/completions", '"model": "tiny", "prompt": "Hi", "prompt": "Ho", "insitu": '),
        ("/insitu/v1/form", '"prompt": "Hi", "prompt": "Ho", "form": '),
        ("/insitu/v1/edits", '"name": "a", "name": "b", "form": '),
    ],
)
def test_a_key_that_comes_twice_is_refused(server: Server, route: str, text: str) -> None:
    body = "{" + text + json.dumps({"actions": [READ]}) + "}"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(server.url + route, body.encode(), headers))
    assert caught.value.code == 400
    assert "a key comes twice" in json.load(caught.value)["error"]["message"]


def test_more_numbers_than_an_answer_in_json_may_have_are_refused(client: Any) -> None:
    read = [{**READ, "as": f"x{number}"} for number in range(256)]
    status, error = refused(lambda: client.completions.create(prompt=[5] * 200, extra_body=beside(*read), **GREEDY))
    assert (status, error["type"]) == (400, "ArgumentError")
    assert "an answer in JSON at most 2097152" in error["message"]


def test_a_stop_text_ends_what_is_read_with_the_last_token(client: Any) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12, "extra_body": beside(LAST), **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    answer = client.completions.create(stop=[text[3:6]], **asked)
    assert answer.choices[0].finish_reason == "stop"
    wanted = answer.choices[0].insitu["saves"]["last"]
    assert len(wanted) == answer.usage.completion_tokens < 12
    *_, last = client.completions.create(stop=[text[3:6]], stream=True, **asked)
    assert last.choices[0].insitu["saves"]["last"] == wanted


def test_a_name_that_an_edit_saves_too_is_refused(client: Any, server: Server) -> None:
    model = insitu.connect(server.url, KEY)
    with model.edit("same") as (tracer, edit):
        rows = model.resid_post[1][-1].save()
    try:
        status, error = refused(lambda: client.completions.create(prompt=PROMPT, extra_body=beside(READ), **GREEDY))
    finally:
        edit.clear()
    assert (status, error["type"]) == (400, "ArgumentError")
    assert "an edit saves 'rows' beside this request as well" in error["message"]


def test_calls_that_fail_while_they_run_are_counted(client: Any, server: Server) -> None:
    def failures() -> float:
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if 'trace_failures_total{kind="openai"}' in line).split()[-1])

    wrong = beside({"do": "read", "at": "embed", "as": "x", "positions": [900]})
    refused(lambda: client.completions.create(prompt=PROMPT, extra_body=wrong, **GREEDY))
    before = failures()
    with pytest.raises(openai.APIError, match="position 900"):
        list(client.completions.create(prompt=PROMPT, stream=True, extra_body=wrong, **GREEDY))
    assert failures() == before + 1


def test_nothing_is_left_behind(server: Server) -> None:
    model = insitu.connect(server.url, KEY)
    assert model.in_flight() == 0
    answer = server.post("/v1/completions", {"prompt": ids_of("llama"), "max_tokens": 3, "ignore_eos": True, **GREEDY})
    assert "insitu" not in answer["choices"][0]
    assert model.run(lambda tracer: tracer.result, PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True).outputs[
        0
    ].token_ids == models.greedy(models.tiny("llama"), ids_of("llama"), 3)
