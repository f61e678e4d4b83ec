"""`model.check()`: passes on models as they are, and fails when anything is moved out of place."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from insitu.engine.check import check as checking
from insitu.engine.check.reference import NoReferenceError
from insitu.engine.check.report import CheckReport, Row
from insitu.run.anatomy import Anatomy
from insitu.run.attention import Kernel
from insitu.run.served import Rows
from tests import models
from tests.engine.helpers import PROMPT, own_engine
from tests.models import LAYERS, tiny

pytestmark = pytest.mark.in_process

OF_LAYER = {"resid_pre", "attn_pattern", "attn_out", "resid_mid", "mlp_out", "resid_post"}


def shown(report: CheckReport) -> str:
    console = Console(width=200, file=io.StringIO())
    report.show(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def of(report: CheckReport, check: str) -> dict[tuple[str, int | None], Row]:
    return {(row.place, row.layer): row for row in report.rows if row.check == check}


def kinds(report: CheckReport) -> set[str]:
    return {row.check for row in report.failed}


@pytest.fixture(params=["mixtral", "gpt2", "llama"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


def test_a_sound_model_passes(name: str, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = model.check()
    assert report.passed, report.failed
    assert report.reference.startswith("transformers ")
    compared = of(report, "transformers")
    for place in OF_LAYER | ({"router_logits"} if name == "mixtral" else set()):
        assert {layer for other, layer in compared if other == place} == set(range(LAYERS)), place
    assert {("embed", None), ("final_norm", None), ("logits", None)} <= set(compared)
    norm = "transformer.h.*.ln_1.output" if name == "gpt2" else "model.layers.*.input_layernorm.output"
    assert (norm, LAYERS - 1) in compared
    assert all(row.difference <= row.bound < 5e-5 for row in compared.values())
    assert any(row.difference > 0 for row in compared.values()), "the two computed it apart from each other"
    added_up = {"resid_pre", "resid_mid", "resid_post", "attn_pattern", "logits"}
    assert {place for place, _ in of(report, "sum")} == added_up
    assert {"q", "k", "v"} <= set(report.not_compared)
    assert set(of(report, "company")) == set(of(report, "values")) >= set(compared)
    text = capsys.readouterr().out
    assert "passed" in text
    assert "resid_post" in text
    assert model.in_flight() == 0


def test_without_a_reference_the_rest_is_compared(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = llama.check(["Water boils at one hundred", [5, 6, 7]], reference=False, show=False)
    assert report.passed
    assert {row.check for row in report.rows} == {"sum", "company", "values"}
    assert "compared with nothing, as asked" in shown(report)
    assert capsys.readouterr().out == ""


def test_where_transformers_can_t_run_it_says_why(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(needed: int) -> None:
        raise NoReferenceError(f"it needs {needed} bytes")

    monkeypatch.setattr(checking, "_require_memory", refuse)
    report = llama.check(show=False)
    assert report.passed
    assert report.reference.startswith("nothing, as transformers can't run this model here: it needs ")
    monkeypatch.undo()
    config = llama.vllm_entrypoint.llm_engine.vllm_config.model_config
    monkeypatch.setattr(config, "model", "/no/such/folder")
    report = llama.check(show=False)
    assert report.passed
    assert "can't run this model here: " in report.reference
    assert "Error" in report.reference


def test_memory_that_is_not_there_is_not_taken() -> None:
    checking._require_memory(1000)
    with pytest.raises(NoReferenceError, match=r"it needs about 1073741824 GiB, and \d+ GiB are free"):
        checking._require_memory(2**60)


def broken(monkeypatch: pytest.MonkeyPatch, model: Any, path: str, change: Callable[[Any], Any]) -> None:
    """The module at ``path`` of vLLM's model computes something else."""
    module = model.vllm_entrypoint.llm_engine.model_executor.driver_worker.get_model().get_submodule(path)
    forward = module.forward
    monkeypatch.setitem(module.__dict__, "forward", lambda *args, **kwargs: change(forward(*args, **kwargs)))


def test_an_offset_in_the_model_fails_from_there_on(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, llama, "model.layers.2.mlp", lambda output: output + 0.01)
    report = llama.check(show=False)
    assert not report.passed
    assert kinds(report) == {"transformers"}, "it is consistent in itself"
    wrong = {(row.place, row.layer) for row in report.failed}
    assert {("mlp_out", 2), ("resid_post", 2), ("model.layers.*.mlp.output", 2), ("logits", None)} <= wrong
    assert not any(layer is not None and layer < 2 for _, layer in wrong)
    assert ("attn_out", 2) not in wrong
    text = shown(report)
    assert "failed: " in text
    assert "mlp_out[2]" in text
    assert "differs" in text


def test_a_name_that_means_something_else_fails(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Anatomy.stream

    def twice(self: Anatomy, name: str, layer: int | None = None) -> Any:
        found = stream(self, name, layer)
        return dataclasses.replace(found, multiplier=1.01) if (name, layer) == ("attn_out", 1) else found

    monkeypatch.setattr(Anatomy, "stream", twice)
    report = llama.check(reference=False, show=False)
    assert {(row.check, row.place, row.layer) for row in report.failed} == {("sum", "resid_mid", 1)}


def test_a_pattern_that_is_not_the_kernels_fails(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = Kernel._scores
    monkeypatch.setattr(Kernel, "_scores", lambda self, q, k: scores(self, q, k) * 1.01)
    report = llama.check(show=False)
    wrong = {(row.check, row.place, row.layer) for row in report.failed}
    kinds_of_it = ("sum", "transformers")
    assert wrong == {(check, "attn_pattern", layer) for check in kinds_of_it for layer in range(LAYERS)}


def test_rows_of_another_request_fail(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows = Rows.of

    def shifted(self: Rows, tensor: torch.Tensor) -> Any:
        return of_rows(self._replace(start=self.start - 1, stop=self.stop - 1) if self.start else self, tensor)

    monkeypatch.setattr(Rows, "of", shifted)
    report = llama.check(reference=False, show=False)
    assert "company" in kinds(report)


def test_values_that_are_not_finite_or_all_zero_fail(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, llama, "model.layers.3.mlp", torch.zeros_like)
    report = llama.check(reference=False, show=False)
    assert {(row.check, row.place, row.layer) for row in report.failed} == {
        ("values", "mlp_out", 3),
        ("values", "model.layers.*.mlp.output", 3),
    }
    assert "not finite, or all zero" in shown(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_the_bound_is_the_measured_noise(
    engines: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_engine(engines, "llama", dtype=dtype) as model:
        report = model.check(show=False)
        assert report.passed, report.failed
        assert "in float32" in report.reference
        eps = torch.finfo(getattr(torch, dtype)).eps
        for row in of(report, "transformers").values():
            assert row.own_error is not None
            assert row.bound == pytest.approx(2 * row.own_error + eps)
        broken(monkeypatch, model, "model.layers.1.self_attn", lambda output: output * 1.2)
        report = model.check(show=False)
        assert ("attn_out", 1) in {(row.place, row.layer) for row in report.failed}


@pytest.mark.slow
def test_a_real_model_passes(smollm2: Any) -> None:
    report = smollm2.check([PROMPT, models.SENTENCES[4]], show=False)
    assert report.passed, report.failed


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "insitu.cli", "check", tiny("llama"), "--dtype", "float32", "--enforce-eager"]
    done = subprocess.run([*command, "--max-model-len", "128"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "passed: " in done.stdout
    assert "resid_post" in done.stdout
    done = subprocess.run([*command, "--max-modle-len", "128"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "did you mean `max_model_len`?" in done.stderr


def test_a_report_is_frozen() -> None:
    report = CheckReport("m", "float32", "nothing", (Row("sum", "logits", None, 0.5, 0.1),), ("x",))
    assert not report.passed
    assert report.failed == report.rows
    assert "no counterpart in transformers: x" in shown(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.dtype = "float16"  # type: ignore[misc]
    assert not CheckReport("m", "float32", "nothing", ()).passed, "nothing was compared"
