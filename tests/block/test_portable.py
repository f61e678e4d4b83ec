"""The portable tests, here and on every other Python that is installed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
VERSIONS = [(3, minor) for minor in range(10, 16)]


def load(name: str) -> ModuleType:
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    return importlib.import_module(name)


def folders() -> Iterator[Path]:
    yield from (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob("versions/*/bin"))


def interpreter(version: tuple[int, int]) -> str | None:
    """A Python of that version that starts; a shim on the path may stand for one that is not installed."""
    name = "python{}.{}".format(*version)
    for folder in folders():
        program = folder / name
        if not program.exists():
            continue
        answer = subprocess.run([program, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
        if answer.returncode == 0 and answer.stdout.decode().strip() == str(version):
            return str(program)
    return None


TESTS = [name for name in vars(load("portable")) if name.startswith("test_")]


@pytest.mark.parametrize("name", TESTS)
def test_here(name: str) -> None:
    getattr(load("portable"), name)()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: "python{}.{}".format(*version))
def test_on(version: tuple[int, int]) -> None:
    program = interpreter(version)
    if program is None:
        pytest.skip("not installed")
    answer = subprocess.run([program, HERE / "portable.py"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    passed = re.search(r"(\d+) of (\d+) passed", answer.stdout)
    assert passed is not None
    assert passed[1] == passed[2] == str(len(TESTS))
