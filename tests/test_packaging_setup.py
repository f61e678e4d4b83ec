"""The setup helper takes torch's CPU build wherever it is to be had."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parent.parent / "tools" / "setup_venv.py"


@pytest.fixture
def helper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installs(helper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(helper, "pip", lambda *arguments: calls.append(arguments))
    return calls


def offer(monkeypatch: pytest.MonkeyPatch, version: str | None, needs: tuple[str, ...] = ()) -> None:
    """Pip's dry run finds this version of torch, or none."""
    item = {"metadata": {"version": version, "requires_dist": ["filelock", *needs]}}
    done = subprocess.CompletedProcess([], 0 if version else 1, json.dumps({"install": [item]}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_takes_the_cpu_build_that_pip_offers(
    helper: ModuleType, installs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, "2.13.0+cpu")
    helper.install_torch()
    assert installs == [("install", "torch==2.13.0+cpu")]


@pytest.mark.parametrize("needs", ["nvidia-cudnn-cu13; platform_system == 'Linux'", "triton==3.5", "cuda-toolkit"])
def test_does_not_take_a_cuda_build(
    helper: ModuleType, installs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, needs: str
) -> None:
    offer(monkeypatch, "2.13.0", (needs,))
    helper.install_torch()
    assert installs == [("install", "torch==2.13.0", "--index-url", helper.TORCH_CPU_INDEX)]


def test_goes_to_the_cpu_index_where_pip_offers_none(
    helper: ModuleType, installs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, None)
    helper.install_torch()
    assert installs == [("install", "torch==2.13.0", "--index-url", helper.TORCH_CPU_INDEX)]


def test_removes_the_companions_that_do_not_import(
    helper: ModuleType, installs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "installed", lambda name: "" if name == "torchcodec" else "1.0")
    monkeypatch.setattr(helper, "imports", lambda name: name == "torchaudio")
    assert helper.drop_broken_companions() == "kept: torchaudio; removed: torchvision, triton"
    assert installs == [("uninstall", "--yes", "torchvision", "triton")]


def test_a_failing_stage_is_shown_and_ends_the_setup(
    helper: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise helper.StageError("no such wheel")

    monkeypatch.setattr(helper, "create_venv", lambda: "kept")
    monkeypatch.setattr(helper, "install_torch", fail)
    monkeypatch.setattr(helper, "install_insitu", lambda: pytest.fail("went on after a failure"))
    assert helper.main() == 1
    shown = capsys.readouterr().out
    assert "[1/6] virtual environment ... kept" in shown
    assert "[2/6] torch, CPU build ... failed" in shown
    assert "no such wheel" in shown
