"""Edits at a real server: of several keys, beside the requests of connected models and of OpenAI's routes."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

import insitu
from tests import models
from tests.engine import served
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import ANN, BEN, KEY, Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
FORMS = "only forms for this"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
VECTOR = torch.linspace(-30, 60, 128)
operator, ann, ben, client = served.model, served.ann, served.ben, served.client


def scale_out() -> list[str]:
    """What ``/inference/v1/generate`` is to be asked for with since vLLM 0.32."""
    options = make_arg_parser(FlexibleArgumentParser())._actions
    return ["--enable-scale-out"] if any(option.dest == "enable_scale_out" for option in options) else []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = [{"name": "ann", "key": ANN}, {"name": "ben", "key": BEN}]
    file = key_file(tmp_path_factory, *keys, {"name": "forms", "key": FORMS, "permission": "form"})
    made = Server("--api-key", KEY, "--insitu-keys", file, *scale_out())
    yield made
    made.close()


@pytest.fixture(scope="module")
def stored() -> Iterator[Any]:
    """A client of a server that keeps responses, and its model."""
    made = Server("--api-key", KEY, environment={**os.environ, "VLLM_ENABLE_RESPONSES_API_STORE": "1"})
    yield openai.OpenAI(base_url=f"{made.url}/v1", api_key=KEY, max_retries=0), insitu.connect(made.url, KEY)
    made.close()


@pytest.fixture(autouse=True)
def no_edits_left(operator: Any, ann: Any, ben: Any) -> Iterator[None]:
    yield
    for model in (operator, ann, ben):
        model.clear_edits()
        assert model.edits() == []
    assert operator.in_flight() == 0


def texts(model: Any, **settings: Any) -> list[str]:
    return [output.outputs[0].text for output in model.generate([PROMPT, "Hello"], **GREEDY, **settings)]


def steered(model: Any, name: str | None = None) -> Any:
    with model.edit(name) as (tracer, edit):
        for step in tracer.all():
            model.resid_post[1][:] += VECTOR
    return edit


def test_generate_is_plain_generation(operator: Any) -> None:
    outputs = operator.generate([PROMPT, ids_of("llama")[:3]], **GREEDY)
    wanted = [models.greedy(models.tiny("llama"), ids, 4) for ids in (ids_of("llama"), ids_of("llama")[:3])]
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert outputs[0].saves == {}
    with pytest.raises(insitu.ArgumentError, match="temprature"):
        operator.generate(PROMPT, temprature=1)
    with pytest.raises(insitu.ArgumentError, match="insitu's own"):
        operator.generate(PROMPT, extra_args={"insitu": {"tenant": "ann"}})


def test_nobody_names_whose_edits_run_beside_a_request(ann: Any, server: Server) -> None:
    steered(ann)
    tag = {"job": None, "group": "", "edits": [], "whole": True, "refusal": "", "tenant": "ann"}
    sampling = {**GREEDY, "extra_args": {"insitu": tag}}
    asked = {"token_ids": ids_of("llama"), "sampling_params": sampling}
    answer = server.post("/inference/v1/generate", asked)
    assert answer["choices"][0]["token_ids"] == models.greedy(models.tiny("llama"), ids_of("llama"), 4)


def test_an_edit_stays_for_everybody_s_requests_until_it_is_cleared(
    operator: Any, ann: Any, server: Server, client: Any
) -> None:
    before = texts(ann)
    edit = steered(operator, "warm")
    assert (edit.name, edit.installed, edit.same_for_rows) == ("warm", True, True)
    under = texts(operator)
    assert texts(ann) == under != before
    with ann.trace(PROMPT, **GREEDY) as tracer:
        result = tracer.result.save()
    assert result.outputs[0].text == under[0]
    plain = client.completions.create(
        model="tiny", prompt=[PROMPT, "Hello"], extra_body={"ignore_eos": True}, temperature=0, max_tokens=4
    )
    assert [choice.text for choice in plain.choices] == under
    without: dict[str, Any] = {"ignore_eos": True, "insitu": {"edits": []}}
    plain = client.completions.create(model="tiny", prompt=PROMPT, extra_body=without, temperature=0, max_tokens=4)
    assert plain.choices[0].text == before[0]
    assert texts(ann, edits=[]) == before
    edit.clear()
    assert texts(ann) == before
    assert not edit.installed


def test_what_an_edit_saves_comes_on_outputs_and_choices(operator: Any, client: Any) -> None:
    with operator.edit() as (tracer, edit):
        norms = [].save()  # type: ignore[attr-defined]
        for step in tracer.all():
            rows = operator.resid_post[2]
            norms.append(rows[-1].norm().item())
            if step == 0:
                hidden = rows.save()
    wanted = hf_stream("llama", ids_of("llama")).resid_post[2]
    (output,) = operator.generate(PROMPT, **GREEDY)
    assert_close(output.saves["hidden"], wanted)
    assert len(output.saves["norms"]) == len(output.outputs[0].saves["norms"]) == 4
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    answer = client.completions.create(**settings, extra_body={"ignore_eos": True})
    assert_close(torch.tensor(answer.choices[0].insitu["saves"]["hidden"]), wanted)
    chunks = list(client.completions.create(**settings, stream=True))
    assert_close(torch.tensor(chunks[-1].choices[0].insitu["saves"]["hidden"]), wanted)


def test_edits_of_a_key_are_for_its_own_requests(operator: Any, ann: Any, ben: Any, client: Any) -> None:
    before = texts(ben)
    edit = steered(ann, "warm")
    under = texts(ann)
    assert under != before == texts(ben) == texts(operator)
    assert [each.name for each in ann.edits()] == ["warm"]
    assert ben.edits() == operator.edits() == []
    assert (
        client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=4).choices[0].text == before[0]
    )
    with pytest.raises(insitu.ArgumentError, match="no installed edit `warm`"):
        ben.generate(PROMPT, edits=["warm"])
    with pytest.raises(insitu.EngineError, match="no edit"):
        ben._running()._http.send("DELETE", f"edits/{edit.number}")
    ben.clear_edits()
    operator.clear_edits()
    assert texts(ann) == under
    assert steered(ben, "warm").number > edit.number  # names of others are nobody's business
    with pytest.raises(insitu.ArgumentError, match="`warm` already"):
        steered(ann, "warm")


def test_a_form_is_installed_without_python(server: Server, operator: Any) -> None:
    def asked(method: str, route: str, key: str, data: Any = None) -> tuple[int, Any]:
        body = None if data is None else json.dumps(data).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/insitu/v1/{route}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    before = texts(operator)
    add = {"do": "add", "at": "resid_post[1]", "vector": VECTOR.tolist(), "when": "all"}
    status, edit = asked("POST", "edits", KEY, {"name": "warm", "form": {"actions": [add]}})
    assert (status, edit["everybody"], edit["own"], edit["same_for_rows"]) == (200, True, True, True)
    under = texts(operator)
    operator.clear_edits()
    steered(operator)
    assert texts(operator) == under != before
    operator.clear_edits()

    read = {"do": "read", "at": "resid_post[2]", "as": "rows"}
    status, edit = asked("POST", "edits", FORMS, {"form": {"actions": [read]}})
    assert (status, edit["everybody"], edit["same_for_rows"]) == (200, False, False)
    body = {"prompt": PROMPT, "form": {"actions": [{**read, "at": "embed", "as": "embed"}]}}
    status, answer = asked("POST", "form", FORMS, body)
    assert_close(torch.tensor(answer["saves"]["rows"]), hf_stream("llama", ids_of("llama")).resid_post[2])
    assert sorted(answer["saves"]) == ["embed", "rows"]
    assert "rows" not in asked("POST", "form", KEY, body)[1]["saves"]
    assert asked("GET", "edits", FORMS)[1]["edits"] == [edit]
    assert asked("DELETE", f"edits/{edit['number']}", KEY)[0] == 404
    assert asked("DELETE", "edits", FORMS)[1] == {"cleared": [edit["number"]]}
    for data, code in (
        ({"form": {"actions": [{**read, "at": "x"}]}}, "unknown-place"),
        ({"nme": "x"}, "ValidationError"),
    ):
        assert asked("POST", "edits", KEY, data)[1]["code"] == code


def test_an_edit_that_fails_fails_the_requests_beside_it(operator: Any, client: Any, server: Server) -> None:
    with operator.edit("strict") as (tracer, edit):
        rows = operator.resid_post[1].shape[0]
        if rows > 5:
            raise ValueError(f"{rows} tokens")
    short, long = ids_of("llama")[:3], ids_of("llama") * 2
    with pytest.raises(ValueError, match=f"{len(long)} tokens") as caught:
        operator.generate([short, long], **GREEDY)
    assert caught.value.invoke == 1  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    assert client.completions.create(prompt=short, **settings).choices[0].finish_reason == "length"
    with pytest.raises(openai.InternalServerError, match=f"ValueError: {len(long)} tokens"):
        client.completions.create(prompt=long, **settings)
    with pytest.raises(openai.APIError, match=f"ValueError: {len(long)} tokens"):
        list(client.completions.create(prompt=long, stream=True, **settings))
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/responses", {"model": "tiny", "input": PROMPT * 3, "max_output_tokens": 4})
    assert refused.value.code == 500
    assert "tokens" in json.load(refused.value)["error"]["message"]


def failing(model: Any, after: int) -> None:
    with model.edit() as (tracer, edit):
        for step in tracer.all():
            if step == after:
                raise ValueError(f"step {step}")


def test_a_streamed_response_under_an_edit_that_fails_ends_with_its_event(operator: Any, client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": PROMPT, "max_output_tokens": 24, "temperature": 0}
    kinds = [event.type for event in client.responses.create(stream=True, **asked)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")  # 0.33 says that max_output_tokens ended it
    failing(operator, 20)  # vLLM puts together what comes while nobody reads
    *before, last = client.responses.create(stream=True, **asked)
    assert "response.output_text.delta" in [event.type for event in before]
    assert [event.sequence_number for event in (*before, last)] == list(range(len(before) + 1))
    assert (last.type, last.response.status, last.response.id) == (
        "response.failed",
        "failed",
        before[0].response.id,
    )
    assert (last.response.error.code, last.response.error.message) == ("server_error", "ValueError: step 20")


def test_a_streamed_message_under_an_edit_that_fails_ends_with_an_error(operator: Any, server: Server) -> None:
    failing(operator, 2)
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{server.url}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = answer.read().decode().split("\n\n")
    assert "ValueError: step 2" in events[-2] or "ValueError: step 2" in events[-3], events


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_the_background_fails_with_its_edit(stored: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": PROMPT, "max_output_tokens": 6, "temperature": 0}
    client, model = stored
    failing(model, 2)
    try:
        made = client.responses.create(background=True, stream=stream, **asked)
        if stream:
            events = list(made)
            assert (events[-1].type, events[-1].response.error.message) == ("response.failed", "ValueError: step 2")
            made = events[0].response
            events = list(client.responses.retrieve(made.id, stream=True))  # told again
            assert events[-1].type == "response.failed"
        for _ in range(100):
            found = client.responses.retrieve(made.id)
            if found.status not in ("queued", "in_progress"):
                break
            time.sleep(0.1)
        assert (found.status, found.error.message) == ("failed", "ValueError: step 2")
    finally:
        model.clear_edits()


def test_no_more_edits_than_may_be_are_installed_at_once(server: Server, ann: Any) -> None:
    def installed(name: str | None) -> int:
        form = {"actions": [{"do": "scale", "at": "mlp_out[1]", "scale": 1.0}]}
        headers = {"Authorization": f"Bearer {ANN}", "Content-Type": "application/json"}
        body = json.dumps({"name": name, "form": form}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{server.url}/insitu/v1/edits", body, headers)):
                return 200
        except urllib.error.HTTPError as error:
            return error.code

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: installed(None), range(80)))
    assert (found.count(200), found.count(429), len(ann.edits())) == (64, 16, 64)
    ann.clear_edits()
    assert [installed(name) for name in ("é漢 1", "a\nb", "a\u202eb", "x" * 101)] == [200, 400, 400, 400]


@pytest.mark.parametrize("source", ["import os", "x = model._engine", "open('/etc/passwd')"])
def test_an_edit_is_restricted(operator: Any, source: str, tmp_path: Any) -> None:
    file = tmp_path / "edit.py"
    file.write_text(f"def install(model):\n    with model.edit() as (tracer, edit):\n        {source}\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(insitu.NotAllowedError):
        space["install"](operator)
    assert operator.edits() == []
