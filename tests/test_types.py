"""What a type checker knows of the public face."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = """\
from typing import Any

import torch
from insitu import VLLM

model = VLLM("somewhere")

def norms(tracer: Any) -> torch.Tensor:
    return model.logits

def read(tracer: Any) -> dict[str, int]:
    return {"tokens": len(tracer.tokens)}

chat = [{"role": "user", "content": "hello"}]
"""
KNOWN = {
    'model.run(norms, "text")': "Tensor",
    'model.run(norms, "text", temperature=0.0, max_tokens=1)': "Tensor",
    "model.run(norms, [1, 2, 3])": "Tensor",
    'model.run(norms, {"prompt": "text"})': "Tensor",
    'model.run(norms, {"prompt_token_ids": [1, 2]})': "Tensor",
    'model.run(norms, [{"role": "user", "content": "hello"}])': "Tensor",
    'model.run(norms, ["one", "two"])': "list[Tensor]",
    "model.run(norms, [[1, 2], [3]])": "list[Tensor]",
    'model.run(read, "text")': "dict[str, int]",
    'model.run(read, ["one", "two"])': "list[dict[str, int]]",
    'model.run(lambda tracer: 1.5, "text")': "float",
    'model.run(norms, "text", n=2)': "Any",
    "model.run(norms, chat)": "Any",  # by their types, a chat and a list of prompt dictionaries are one
    "model.run(norms, torch.ones(3))": "Any",
    "model.positions_of('a', 'text')": "range",
    "model.positions_of('a', 'text', every=True)": "list[range]",
    "model.model.layers[0]": "Node",
    "model.model.layers[1:]": "list[Node]",
    "len(model.resid_post)": "int",
    "model.trace('text')": "Trace",
    "model.close()": "None",
}


@pytest.fixture(scope="module")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("types")
    lines = [f"reveal_type({expression})" for expression in KNOWN]
    (folder / "user.py").write_text(TEXT + "\n".join(lines) + "\n")
    (folder / "strict.py").write_text((ROOT / "tests" / "strict_user.py").read_text())
    config = {"extraPaths": [str(ROOT / "src")], "pythonVersion": "3.10", "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)],
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    found = report["generalDiagnostics"]
    assert [(each["file"], each["message"]) for each in found if each["severity"] == "error"] == []
    shown = {each["range"]["start"]["line"]: each["message"] for each in found if each["severity"] == "information"}
    first = TEXT.count("\n")
    types = [re.search(r'is "(.*)"$', shown[first + i]) for i in range(len(KNOWN))]
    return {expression: found[1] for expression, found in zip(KNOWN, types, strict=True) if found}


@pytest.mark.slow
@pytest.mark.parametrize("expression", KNOWN)
def test_the_type_of(revealed: dict[str, str], expression: str) -> None:
    assert revealed[expression] == KNOWN[expression]
