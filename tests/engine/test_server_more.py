"""What else a real server does: sources, checks, progress, metrics, trusted code, clients that have next to nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu import recipes
from insitu.net import CONTENT_TYPE, CodeSource, InvokeRequest, Progress, TraceRequest, encode_frame
from tests import models
from tests.engine import served
from tests.engine.helpers import PROMPT
from tests.engine.served import KEY, Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
RESTRICTED = "a key for restricted blocks"
model = served.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = key_file(tmp_path_factory, {"name": "ann", "key": RESTRICTED})
    made = Server("--api-key", KEY, "--insitu-keys", file, "--trust-code")
    yield made
    made.close()


@pytest.fixture(scope="module")
def ann(server: Server) -> Any:
    return insitu.connect(server.url, RESTRICTED)


def test_the_operations_of_a_module_are_listed_and_read(model: Any) -> None:
    listed = str(model.model.layers[1].mlp.source)
    assert "down_proj" in listed
    assert re.search(r"^\d+ ", listed, re.MULTILINE)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        inner = model.model.layers[1].mlp.source.self_down_proj_0.output.save()
        whole = model.model.layers[1].mlp.output.save()
    assert (inner[0] == whole).all()
    with pytest.raises(insitu.InsituError):
        str(model.get("model.layers.1.nothing").source)


def test_operations_of_a_module_that_is_not_there_are_not_found(server: Server) -> None:
    for path in ("model.layers.99", "__class__", "%00"):
        request = urllib.request.Request(
            f"{server.url}/insitu/v1/source?path={path}", headers={"Authorization": f"Bearer {KEY}"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert (caught.value.code, json.load(caught.value)["error"]["code"]) == (404, "UnknownModuleError")


def test_others_are_answered_while_a_long_block_is_compiled(server: Server) -> None:
    text = "".join(f" x = {number} + 1\n" for number in range(12_000)) + " open(x)"
    body = encode_frame(TraceRequest([InvokeRequest("Hi", CodeSource("a.py", 1, "f", "f", text))]).frame())
    headers = {"Content-Type": CONTENT_TYPE, "Authorization": f"Bearer {RESTRICTED}"}

    def asked() -> tuple[bytes, float]:
        start = time.monotonic()
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/insitu/v1/trace", body, headers)) as answer:
            return answer.read(), time.monotonic() - start

    with ThreadPoolExecutor(1) as pool:
        running, slowest = pool.submit(asked), 0.0
        while not running.done():
            start = time.monotonic()
            urllib.request.urlopen(f"{server.url}/health", timeout=60).close()
            slowest = max(slowest, time.monotonic() - start)
    answer, took = running.result()
    assert b"`open` is not in the list" in answer
    assert slowest < took / 2


def test_a_check_is_done_at_the_server(model: Any, ann: Any) -> None:
    report = model.check([PROMPT, "Hello there"], show=False)
    assert report.passed
    assert {"transformers", "sum", "company"} <= {row.check for row in report.rows}
    with pytest.raises(insitu.EngineError, match="answered 403"):
        ann.check(show=False)
    with model.edit():
        hidden = model.resid_post[0].save()
    with pytest.raises(insitu.ArgumentError, match="clear its edits first"):
        model.check(reference=False, show=False)
    model.clear_edits()


def test_a_long_trace_tells_how_far_it_is(server: Server) -> None:
    seen: list[Progress] = []
    model = insitu.connect(server.url, KEY, progress=seen.append)

    def block(tracer: Any) -> None:
        for _ in tracer.iter[:]:
            hidden = model.resid_post[0]

    for _ in range(20):
        model.run(block, [PROMPT, "Hello"], max_tokens=240, ignore_eos=True)
        if seen:
            break
    assert seen[-1].running + seen[-1].ended + seen[-1].waiting == 2
    assert seen[-1].tokens > 0


def metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        found = re.findall(r"^(insitu_[^ ]+) (\S+)$", answer.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_metrics_count_what_was_done(server: Server, model: Any) -> None:
    before = metrics(server)
    hidden = model.run(lambda tracer: model.resid_post[0], PROMPT, max_tokens=1)
    with pytest.raises(ZeroDivisionError):
        model.run(lambda tracer: 1 / 0, PROMPT, max_tokens=1)
    after = metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('insitu_traces_total{kind="trace"}') == 2
    assert grown('insitu_trace_failures_total{kind="trace"}') == 1
    assert grown("insitu_saved_bytes_total") == hidden.nbytes
    assert grown('insitu_steps_total{path="eager"}') >= 1
    assert grown("insitu_block_seconds_total") > 0


def test_trusted_keys_run_any_code_and_others_none_of_it(model: Any, ann: Any, tmp_path: Path) -> None:
    made = str(tmp_path / "made")

    def helper(number: int, *, scale: int = 2) -> int:
        import os

        return scale * number + 0 * os.getpid()

    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        import pathlib

        pathlib.Path(made).write_text("here")
        twice = helper(21)
        twice.save()  # type: ignore[attr-defined]
    assert (Path(made).read_text(), twice) == ("here", 42)
    assert model.run(lambda tracer: __import__("math").sqrt(4.0), PROMPT, max_tokens=1) == 2.0
    with pytest.raises(insitu.NotAllowedError), ann.trace(PROMPT, max_tokens=1):
        import pathlib
    with pytest.raises(insitu.NotAllowedError):
        ann.run(lambda tracer: helper(21), PROMPT, max_tokens=1)


CLIENT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import insitu

model = insitu.connect(sys.argv[1], sys.argv[2])
with model.trace("Hello there", temperature=0.0, max_tokens=2) as tracer:
    hidden = model.resid_post[2].save()
    norms = [model.logits.norm().item()].save()
    for step in tracer.iter[1:]:
        norms.append(model.logits.norm().item())
    result = tracer.result.save()
assert type(hidden).__module__ == "numpy", type(hidden)
assert len(norms) == 2 and len(result.outputs[0].token_ids) == 2
with model.edit("steer") as (tracer, edit):
    for step in tracer.all():
        model.resid_post[1][:] += 3.0
(output,) = model.generate("Hello there", temperature=0.0, max_tokens=2)
assert output.finished and model.edits() == [edit]
model.clear_edits()
try:
    model.run(lambda tracer: 1 / 0, "Hello")
except ZeroDivisionError:
    print("raised")
print(model.run(lambda tracer: model.resid_post[0].shape, "Hello there", max_tokens=1))
print("layers", len(model.resid_post), *sorted(BLOCKED & set(sys.modules)))
"""
LEFT_OUT = {"vllm", "torch", "greenlet", "transformers", "msgspec", "cloudpickle", "tblib", "RestrictedPython", "zmq"}


def test_a_client_needs_nothing_but_insitu_s_own_dependencies(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "client.py"
    file.write_text(f"BLOCKED = {LEFT_OUT!r}\n{CLIENT}")
    done = subprocess.run(
        [sys.executable, str(file), server.url, KEY], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "raised"
    assert "layers 4" in done.stdout


def test_the_openapi_page_says_what_each_route_takes(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    ours = {f"{method.upper()} {path}" for path, methods in paths.items() if "/insitu/" in path for method in methods}
    wanted = "GET model, GET tokenizer, GET stats, GET source, POST check, POST trace, POST generate, GET edits"
    wanted += ", POST edits, DELETE edits, DELETE edits/{number}, GET form, POST form"
    assert ours == {each.replace(" ", " /insitu/v1/") for each in wanted.split(", ")}
    form = paths["/insitu/v1/form"]["post"]
    schema = form["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "form"} <= set(schema["required"])
    assert "saves" in json.dumps(form["responses"]["200"])
    trace = paths["/insitu/v1/trace"]["post"]
    assert list(trace["requestBody"]["content"]) == list(trace["responses"]["200"]["content"]) == [insitu_type()]
    assert {"400", "401", "403", "429"} <= set(trace["responses"])


def insitu_type() -> str:
    from insitu.net import CONTENT_TYPE

    return CONTENT_TYPE


def test_what_needs_an_engine_of_this_machine_says_so(model: Any, tmp_path: Path) -> None:
    lens = recipes.logit_lens(model, PROMPT)
    assert len(lens.top) == models.LAYERS
    with pytest.raises(insitu.ArgumentError, match="the model is at a server"):
        recipes.rows_at(model, [PROMPT], "resid_post[1]")
    with pytest.raises(insitu.ArgumentError, match="got RemoteModel"):
        insitu.capture(model, [PROMPT], at="resid_post[1]", out=tmp_path, progress=False)


def test_a_closed_model_says_how_to_have_it_again(server: Server) -> None:
    other = insitu.connect(server.url, KEY)
    other.close()
    with pytest.raises(insitu.EngineError, match=r"was closed; make a new insitu.connect\("):
        other.trace(PROMPT)
