"""The floors of the house hold: who may import whom, and what `import insitu` may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "insitu"


def imported_names(file: Path) -> set[str]:
    """Full names of all that `file` imports absolutely, imports inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return names


def test_import_contracts() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "file", sorted((SOURCE / "block").rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_block_uses_the_standard_library_alone(file: Path) -> None:
    foreign = {
        name
        for name in imported_names(file)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("insitu.block")
    }
    assert not foreign


@pytest.mark.parametrize("room", ["block", "tree"])
def test_low_floors_know_no_torch(room: str) -> None:
    for file in (SOURCE / room).rglob("*.py"):
        assert not {name for name in imported_names(file) if name.split(".")[0] in {"torch", "vllm"}}, file


def test_the_door_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, insitu; insitu.VLLM; insitu.demo_model\n"
        "print(*sorted({'torch', 'vllm', 'numpy', 'transformers', 'greenlet'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_a_lazy_model_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, insitu; model = insitu.VLLM('some/folder', dtype='float32')\n"
        "assert not model.dispatched\n"
        "print(*sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
