"""Starting an engine: what is refused, and where it starts all the same."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import insitu

pytestmark = pytest.mark.in_process


@pytest.mark.parametrize(
    ("repo", "text"),
    [
        ("/no/such/folder", r"there is no folder `/no/such/folder`"),
        ("./missing", r"there is no folder `\./missing`"),
        ("nobody/nothing-here", r"`nobody/nothing-here` is neither a folder nor in the local cache, and the Hub"),
        ("not a repo!!", r"`not a repo!!` is neither a folder nor a repository of the Hub"),
    ],
)
def test_a_model_that_is_not_there(repo: str, text: str) -> None:
    with pytest.raises(insitu.EngineError, match=text):
        insitu.VLLM(repo, dispatch=True)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(insitu.EngineError, match=r"holds no model: it has no config\.json"):
        insitu.VLLM(str(tmp_path), dispatch=True)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (
            {"max_model_length": 9},
            r"`max_model_length` is not an engine argument of vLLM .*; did you mean `max_model_len`\?",
        ),
        ({"zzz": 1}, r"`zzz` is not an engine argument of vLLM [\d.]+$"),
        ({"worker_extension_cls": "a.B"}, r"`worker_extension_cls` is set by insitu itself"),
        ({"data_parallel_size": 2}, r"`data_parallel_size`: .*: add mode='async', or use `insitu serve`"),
        ({"data_parallel_rank": 0}, r"`data_parallel_rank`: .*: give data_parallel_size=N alone"),
        (
            {"mode": "async", "data_parallel_size": 2, "data_parallel_backend": "ray"},
            r"`data_parallel_backend`: .*: give data_parallel_size=N alone, or start a server for each copy",
        ),
        (
            {"mode": "async", "data_parallel_size": 4, "data_parallel_size_local": 2},
            r"`data_parallel_size_local`: .*: give data_parallel_size=N alone",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            r"`pipeline_parallel_size`: this version has no `tensor_parallel_size` beside it",
        ),
    ],
)
def test_an_argument_that_vllm_does_not_have(tiny_folder: Any, argument: dict[str, Any], text: str) -> None:
    with pytest.raises(insitu.ArgumentError, match=text):
        insitu.VLLM(tiny_folder("llama"), dispatch=True, **argument)


def test_making_a_model_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, insitu; model = insitu.VLLM('some/model', dtype='float32'); repr(model); model.in_flight(); "
        "model.model.layers[3].mlp; heavy = {'torch', 'vllm', 'transformers', 'numpy', 'greenlet'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_vllm_names_the_extras() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import insitu\n"
        "try: insitu.VLLM('some/model', dispatch=True)\n"
        "except insitu.EngineError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "here `vllm` is missing: pip install 'insitu[cpu]'" in done.stdout


def test_it_starts_by_itself_where_standard_output_has_no_descriptor(
    tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    with insitu.VLLM(tiny_folder("llama"), dtype="float32", enforce_eager=True, max_model_len=64) as model:
        with model.trace("hello", max_tokens=1):
            logits = model.logits.save()
        assert sys.stdout is shown
    assert logits.dim() == 2


def test_two_engines_in_one_process_keep_to_themselves(llama: Any, tiny_folder: Any) -> None:
    with llama.trace("hello there", temperature=0.0, max_tokens=1):
        before = llama.model.layers[1].output[0].save()
    with insitu.VLLM(tiny_folder("llama"), dtype="float32", enforce_eager=True, max_model_len=64) as other:
        with other.trace("hello there", temperature=0.0, max_tokens=1):
            other.model.layers[0].output[0][:] = 0
            theirs = other.model.layers[1].output[0].save()
        with llama.trace("hello there", temperature=0.0, max_tokens=1):
            ours = llama.model.layers[1].output[0].save()
    assert ours.equal(before)
    assert not theirs.equal(before)
    with llama.trace("hello there", temperature=0.0, max_tokens=1):
        after = llama.model.layers[1].output[0].save()
    assert after.equal(before)


@pytest.mark.slow
def test_a_compiled_engine_runs_compiled_but_for_steps_with_a_waiting_block(llama: Any, tiny_folder: Any) -> None:
    def values(model: Any) -> tuple[Any, ...]:
        with model.trace("hello there", temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            pair = model.model.layers[1].output.save()
            logits = model.logits.save()
            result = tracer.result.save()
        return *pair, logits, result.outputs[0].token_ids

    expected = values(llama)
    with insitu.VLLM(tiny_folder("llama"), dtype="float32", max_model_len=64) as model:
        config = model.vllm_entrypoint.llm_engine.vllm_config
        assert not config.model_config.enforce_eager
        found = values(model)
        stats = model.stats()
    assert (stats.eager_steps, stats.plain_steps) == (1, 3)
    assert found[3] == expected[3]
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))
