"""The command line, with no engine behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import insitu.engine.client.model
import insitu.walkthrough
from insitu import ArgumentError
from insitu.cli import main


class Report:
    def __init__(self, passed: bool) -> None:
        self.passed = passed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for the model was made and asked with; `passed` is what its check finds."""
    seen: dict[str, Any] = {"passed": True}

    class Model:
        def __init__(self, repo: str, **engine_args: Any) -> None:
            if "no_such" in engine_args:
                raise ArgumentError("`no_such` is not an engine argument")
            seen.update(repo=repo, engine_args=engine_args)

        def __enter__(self) -> Model:
            return self

        def __exit__(self, *_: Any) -> None:
            seen["closed"] = True

        def check(self, prompts: Any, *, reference: bool) -> Report:
            seen.update(prompts=prompts, reference=reference)
            return Report(seen["passed"])

    monkeypatch.setattr(insitu.engine.client.model, "VLLM", Model)
    return seen


def test_check_passes_or_fails(made: dict[str, Any]) -> None:
    assert main(["check", "some/model"]) == 0
    assert (made["repo"], made["engine_args"], made["prompts"], made["reference"]) == ("some/model", {}, None, True)
    assert made["closed"]
    made["passed"] = False
    assert main(["check", "some/model"]) == 1


def test_options_of_vllm_are_passed_on(made: dict[str, Any]) -> None:
    options = ["--dtype", "bfloat16", "--max-model-len=512", "--enforce-eager", "--no-enable-prefix-caching"]
    others = ["--no-reference", "--prompt", "One", "--prompt=Two", "--gpu-memory-utilization", "0.5"]
    assert main(["check", "some/model", *options, *others]) == 0
    assert made["engine_args"] == {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
    }
    assert (made["prompts"], made["reference"]) == (["One", "Two"], False)


def test_what_can_t_run_says_why(made: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "some/model", "--no_such=3"]) == 2
    assert capsys.readouterr().err == "insitu check: `no_such` is not an engine argument\n"
    for wrong, message in ([[], "command"], [["check"], "model"], [["check", "m", "stray", "x"], "stray"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(insitu.walkthrough, "main", seen.append)
    assert main(["demo", "--out", "here"]) == 0
    assert seen == [["--out", "here"]]


def test_the_package_has_the_command() -> None:
    project = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    assert re.search(r'\[project\.scripts\]\ninsitu = "insitu\.cli:main"', project)
