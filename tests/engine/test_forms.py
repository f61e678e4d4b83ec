"""One small trace in every place where code is written, on a real engine."""

from __future__ import annotations

import asyncio
import code
import functools
import json
import linecache
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.models import WIDTH

ROOT = Path(__file__).resolve().parent.parent.parent
SCALE = 3


@pytest.fixture
def stream() -> torch.Tensor:
    """The residual after layer 1, which each of the forms reads."""
    return hf_stream("llama", ids_of("llama")).resid_post[1]


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Norm:
    def __init__(self, power: int) -> None:
        self.power = power

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x.norm(self.power)


# Functions, methods, loops, closures.


def traced_in_a_function(model: Any) -> torch.Tensor:
    with model.trace(PROMPT, max_tokens=1):
        hidden = model.resid_post[1].save()
    return hidden


class Experiment:
    layer = 1

    def __init__(self, model: Any) -> None:
        self.model = model
        self.__secret = 1
        self.seen: list[torch.Tensor] = []

    def run(self) -> torch.Tensor:
        with self.model.trace(PROMPT, max_tokens=1):
            hidden = (self.model.resid_post[self.layer] * self.__secret).save()
        return hidden

    def collect(self) -> None:
        with self.model.trace(PROMPT, max_tokens=1):
            self.seen.append(self.model.resid_post[self.layer])

    @classmethod
    def made(cls, model: Any) -> torch.Tensor:
        with model.trace(PROMPT, max_tokens=1):
            hidden = model.resid_post[cls.layer].save()
        return hidden


def traced_in_a_closure(model: Any) -> Callable[[int], torch.Tensor]:
    factor = 2

    def inner(layer: int) -> torch.Tensor:
        hidden = None

        def innermost() -> None:
            nonlocal hidden
            with model.trace(PROMPT, max_tokens=1):
                hidden = (model.resid_post[layer] * factor / 2).save()

        innermost()
        assert hidden is not None
        return hidden

    return inner


def traced_in_a_generator(model: Any) -> Iterator[torch.Tensor]:
    for layer in (0, 1):
        with model.trace(PROMPT, max_tokens=1):
            hidden = model.resid_post[layer].save()
        yield hidden


async def traced_in_a_coroutine(model: Any) -> torch.Tensor:
    await asyncio.sleep(0)
    with model.trace(PROMPT, max_tokens=1):
        hidden = model.resid_post[1].save()
    await asyncio.sleep(0)
    return hidden


def test_in_a_function(llama: Any, stream: torch.Tensor) -> None:
    assert_close(traced_in_a_function(llama), stream)


def test_in_a_method(llama: Any, stream: torch.Tensor) -> None:
    experiment = Experiment(llama)
    assert_close(experiment.run(), stream)
    assert_close(Experiment.made(llama), stream)
    experiment.collect()  # an object of the caller is the same object in the block
    assert_close(experiment.seen[0], stream)


def test_in_a_loop(llama: Any) -> None:
    resid = hf_stream("llama", ids_of("llama")).resid_post
    found = []
    for layer in range(4):
        with llama.trace(PROMPT, max_tokens=1):
            if layer == 2:
                llama.resid_post[0][:] *= 1.0
            hidden = llama.resid_post[layer].save()
        found.append(hidden)
    for layer, hidden in enumerate(found):
        assert_close(hidden, resid[layer], f"layer {layer}")


def test_in_a_closure(llama: Any, stream: torch.Tensor) -> None:
    assert_close(traced_in_a_closure(llama)(1), stream)


def test_in_a_generator_and_a_coroutine(llama: Any, stream: torch.Tensor) -> None:
    assert_close(list(traced_in_a_generator(llama))[1], stream)
    assert_close(asyncio.run(traced_in_a_coroutine(llama)), stream)


def test_in_a_class_body(llama: Any, stream: torch.Tensor) -> None:
    class Holder:
        with llama.trace(PROMPT, max_tokens=1):
            hidden = llama.resid_post[1].save()

    assert_close(Holder.hidden, stream)


def test_ordinary_python_in_a_block(llama: Any) -> None:
    """Helpers, classes, imports, lambdas, comprehensions, branches, unpacking, early break: all on live values."""
    resid = hf_stream("llama", ids_of("llama")).resid_post
    norms = [value.norm().item() for value in resid]
    limit = sorted(norms)[2] - 1e-3
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        import statistics

        (hidden, residual), wanted = llama.model.layers[0].output, [0, 1]
        first, *others = (hidden + residual).sum(-1).tolist()
        found = {"first": first, "others": others}.save()
        above: list[int] = [].save()
        for layer in range(1, 4):
            value = llama.resid_post[layer]
            if (size := Norm(2).of(value)) < limit:
                continue
            above.append(layer)
            try:
                _ = [1][layer]
            except IndexError:
                caught = True.save()
            big = max((scaled(row) for row in value), key=lambda row: row.norm()).save()
            break
        while True:
            with torch.no_grad():
                mean = statistics.fmean(llama.logits[0].tolist()).save()
            break
        assert math.isfinite(mean)
    with torch.no_grad():
        assert_close(torch.tensor([found["first"], *found["others"]]), resid[0].sum(-1))
        first_above = next(layer for layer in (1, 2, 3) if norms[layer] >= limit)
        assert above == [first_above]
        assert caught is True
        assert_close(big, max((row * SCALE for row in resid[first_above]), key=lambda row: row.norm()))
    assert mean == pytest.approx(hf_stream("llama", ids_of("llama")).logits[-1].mean().item(), abs=1e-5)


def test_an_exception_handled_by_name(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        rows = llama.resid_post[1]
        try:
            rows[99]
        except IndexError as error:
            caught = str(error).save()
    assert "out of bounds" in caught


def test_unsaved_names_keep_what_they_had(llama: Any) -> None:
    hidden = "before"
    with llama.trace(PROMPT, max_tokens=1):
        hidden = llama.resid_post[1]
        kept = (hidden.sum() * 0).item().save()
    assert hidden == "before"
    assert kept == 0


def test_asserts_in_a_block_are_pytests(llama: Any) -> None:
    """Assert rewriting changes this file's code; the block's own assertion fails on its own line."""
    with pytest.raises(AssertionError) as caught, llama.trace(PROMPT, max_tokens=1):
        rows = llama.resid_post[1].shape[0]
        assert rows == -1
    assert caught.traceback[-1].name == "test_asserts_in_a_block_are_pytests"
    assert "assert rows == -1" in str(caught.traceback[-1].statement)


# Where code has no file.

TEXT = """\
def twice(x):
    return x * 2

with model.trace(prompt, temperature=0.0, max_tokens=1) as tracer:
    half = twice(model.resid_post[1]).save()
    result = tracer.result.save()
"""


def namespace(model: Any) -> dict[str, Any]:
    return {"__name__": "__main__", "model": model, "prompt": PROMPT}


def assert_traced(names: dict[str, Any], stream: torch.Tensor) -> None:
    assert_close(names["half"], 2 * stream)
    assert names["result"].outputs[0].text
    assert names["tracer"] is not None


def test_exec_with_linecache(llama: Any, stream: torch.Tensor) -> None:
    filename = "<somewhere else>"
    linecache.cache[filename] = (len(TEXT), None, TEXT.splitlines(keepends=True), filename)
    try:
        names = namespace(llama)
        exec(compile(TEXT, filename, "exec"), names)
    finally:
        del linecache.cache[filename]
    assert_traced(names, stream)


def compiled_from_nowhere() -> types.CodeType:
    return compile("".join(TEXT.splitlines(keepends=True)), "<nowhere>", "exec")


def test_without_source_the_error_offers_the_function_form(llama: Any, stream: torch.Tensor) -> None:
    names = namespace(llama)
    with pytest.raises(insitu.SourceError, match=r"model\.run\(fn, prompt\)") as caught:
        exec(compiled_from_nowhere(), names)
    assert "<nowhere>:4" in str(caught.value)
    assert "half" not in names
    exec("def block(tracer):\n    return model.resid_post[1]\nhidden = model.run(block, prompt)", names)
    assert_close(names["hidden"], stream)


class Console(code.InteractiveConsole):
    """The interactive prompt of Python 3.13 and later, which keeps what was typed."""

    entries = 0

    def runsource(self, source: str, filename: str = "", symbol: str = "single") -> bool:
        filename = f"<python-input-{Console.entries}>"
        Console.entries += 1
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        return super().runsource(source, filename, symbol)


def test_at_a_prompt_that_keeps_its_source(llama: Any, stream: torch.Tensor) -> None:
    console = Console(namespace(llama))
    more = [console.push(line) for line in [*TEXT.splitlines(), ""]]
    assert more[-1] is False
    assert_traced(console.locals, stream)
    console.push("again = half")
    assert_close(console.locals["again"], 2 * stream)


def test_at_a_console_made_by_hand(llama: Any, stream: torch.Tensor) -> None:
    """Debuggers and test harnesses open one; its source is kept nowhere, but is still in its frames."""
    console = code.InteractiveConsole(namespace(llama))
    for line in ["with model.trace(prompt, max_tokens=1):", "    half = model.resid_post[1].save()", ""]:
        console.push(line)
    assert_close(console.locals["half"], stream)


@pytest.fixture(scope="module")
def shell() -> Any:
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def test_in_notebook_cells(llama: Any, shell: Any, stream: torch.Tensor) -> None:
    shell.user_ns.update(namespace(llama))
    shell.run_cell(TEXT, store_history=True).raise_error()
    assert_traced(shell.user_ns, stream)
    shell.run_cell("def scaled(x):\n    return x * factor\n\nfactor = 5").raise_error()
    cell = "%%time\nwith model.trace(prompt, max_tokens=1):\n    five = scaled(model.resid_post[1]).save()"
    shell.run_cell(cell).raise_error()
    assert_close(shell.user_ns["five"], 5 * stream)


def test_an_error_in_a_cell_shows_the_cells_line(llama: Any, shell: Any, capsys: Any) -> None:
    shell.user_ns.update(namespace(llama))
    cell = "with model.trace(prompt, max_tokens=1):\n    hidden = model.resid_post[1]\n    hidden[99]"
    done = shell.run_cell(cell)
    assert isinstance(done.error_in_exec, IndexError)
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(capsys.readouterr()))
    assert "hidden[99]" in shown
    assert "insitu/" not in shown


SCRIPT = """\
import tests.conftest
import insitu, json, sys
from tests import models

model = insitu.VLLM(models.tiny("llama"), dtype="float32", enforce_eager=True, max_model_len=128)
found = {"dispatched": model.dispatched}
with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
    hidden = model.resid_post[1].save()
    result = tracer.result.save()
found["ids"] = list(result.outputs[0].token_ids)
found["stream"] = hidden.tolist()

def function():
    with model.trace(PROMPT, max_tokens=1):
        inside = model.resid_post[1].equal(hidden).save()
    return inside

found["function"] = function()
for i in range(2):
    with model.trace(PROMPT, max_tokens=1):
        found["loop"] = i
        found.save()
class Stream:  # a standard output without a descriptor, as in notebooks
    def write(self, text): pass
    def flush(self): pass
standard, sys.stdout = sys.stdout, Stream()
model.close()
second = insitu.VLLM(models.tiny("llama"), dtype="float32", enforce_eager=True, max_model_len=128)
with second.trace(PROMPT, max_tokens=1):
    again = second.resid_post[1].equal(hidden).save()
sys.stdout = standard
try:
    with model.trace(PROMPT): pass
except insitu.EngineError as error:
    found["closed"] = str(error)
found["second"] = again
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
def test_in_a_script_without_a_guard(tmp_path: Path, stream: torch.Tensor) -> None:
    """Built by the first trace, from the top level of a file; closed and built again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("PROMPT", repr(PROMPT)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found["dispatched"] is False
    assert found["ids"] == models.greedy(models.tiny("llama"), ids_of("llama"), 4)
    assert_close(torch.tensor(found["stream"]), stream)
    assert (found["function"], found["loop"], found["second"]) == (True, 1, True)
    assert "closed" in found["closed"]


# The function form.


class Reader:
    def __init__(self, model: Any, layer: int) -> None:
        self.model, self.layer = model, layer

    def read(self, tracer: Any) -> torch.Tensor:
        return self.model.resid_post[self.layer]

    __call__ = read


def test_callables_of_every_kind(llama: Any, stream: torch.Tensor) -> None:
    def block(tracer: Any) -> torch.Tensor:
        return llama.resid_post[1]

    def with_layer(layer: int, tracer: Any) -> torch.Tensor:
        return llama.resid_post[layer]

    callables = [
        block,
        lambda tracer: llama.resid_post[1],
        functools.partial(with_layer, 1),
        Reader(llama, 1).read,
        Reader(llama, 1),
    ]
    for function in callables:
        assert_close(llama.run(function, PROMPT, max_tokens=1), stream)


def test_a_function_of_several_prompts(llama: Any) -> None:
    prompts = [PROMPT, "Water boils at", "Once"]

    def block(tracer: Any) -> dict[str, Any]:
        llama.resid_post[0][:] *= 1.0
        last = llama.resid_post[1][-1]
        return {"last": last, "text": tracer.result.outputs[0].text}

    found = llama.run(block, prompts, temperature=0.0, max_tokens=3)
    assert len(found) == 3
    for prompt, values in zip(prompts, found, strict=True):
        assert_close(values["last"], hf_stream("llama", ids_of("llama", prompt)).resid_post[1][-1])
        assert values["last"].untyped_storage().nbytes() == WIDTH * 4
        assert values["text"] == models.greedy_text(models.tiny("llama"), prompt, 3)


def test_a_function_that_is_not_one(llama: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match="function of the tracer"):
        llama.run("not a function", PROMPT)
