"""What is in the built package, and that it works where nothing else is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "insitu").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"insitu/py.typed", "insitu/plots/lens_page.html"} <= found


def test_version_and_licence(metadata: Message) -> None:
    declared = re.search(r'"(.+)"', (ROOT / "src/insitu/_version.py").read_text())
    assert declared
    assert metadata["Version"] == declared[1]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_what_is_to_be_cited_has_the_same_version(metadata: Message) -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == metadata["Version"]


def test_vllm_and_torch_come_with_extras_only(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    base = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert not re.search(r"torch|vllm|transformers|matplotlib", " ".join(base))
    assert {"cpu", "cuda", "plots", "demo", "dev"} <= set(metadata.get_all("Provides-Extra") or [])


def test_imports_with_the_standard_library_alone(wheel: Path) -> None:
    # -S leaves out site-packages, so nothing that is installed here can help.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import insitu\n"
        "model = insitu.VLLM('some/folder'); print(insitu.__version__, model.dispatched)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "False"


@pytest.mark.slow
def test_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    # What it depends on comes from an index, which a test does not ask; `import insitu` needs none of it.
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    code = "import insitu, sys; print(insitu.__version__, {'torch', 'vllm'} & set(sys.modules), insitu.VLLM('a'))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    declared = re.search(r'"(.+)"', (ROOT / "src/insitu/_version.py").read_text())
    assert declared
    assert done.stdout.startswith(f"{declared[1]} set()"), done.stdout
    capture = ["capture", "--model", "some/model", "--data", "x.txt", "--at", "resid_post", "--out", "out"]
    for command in (["check", "some/model"], ["serve", "some/model"], capture):
        done = subprocess.run([python.parent / "insitu", *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        told = rf"insitu {command[0]}: .* needs vLLM.*, and here `\w+` is missing: pip install 'insitu\[cpu[^\n]*\n"
        assert re.fullmatch(told, done.stderr), done.stderr
    code = "import insitu\ntry: insitu.capture\nexcept insitu.EngineError as error: print(error)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "`torch` is missing: pip install 'insitu[cpu,capture]'" in done.stdout, done.stderr
