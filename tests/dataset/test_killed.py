"""The command, killed and run again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import models

pytestmark = [pytest.mark.in_process, pytest.mark.slow, pytest.mark.timeout(900)]
SHARD = 50_000  # ends within a window


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.txt"
    file.write_text("".join(f"{'the cat sat ' * (1 + number % 5)}{number}\n" for number in range(400)))
    return file


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run writes."""
    out = tmp_path_factory.mktemp("whole")
    run(data, out)
    return out


def command(data: Path, out: Path, *more: str) -> list[str]:
    tiny = models.tiny("llama")
    engine = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    settings = ["--at", "resid_post[1:3]", "--shard-bytes", str(SHARD), "--window-tokens", "40", *more, *engine]
    return [
        sys.executable,
        "-m",
        "insitu.cli",
        "capture",
        "--model",
        tiny,
        "--data",
        str(data),
        "--out",
        str(out),
        *settings,
    ]


def run(data: Path, out: Path, *more: str) -> str:
    done = subprocess.run(command(data, out, *more), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shards(out: Path) -> int:
    return len(list(out.glob("shard-*.parquet")))


def assert_same(one: Path, other: Path) -> None:
    """To the bit, the files of both."""
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def test_killed_and_run_again_it_is_as_if_nothing_had_been(data: Path, whole: Path, tmp_path: Path) -> None:
    total, out = shards(whole), tmp_path / "out"
    assert total >= 8
    kills = 0
    for wanted in (1, total // 2):
        process = subprocess.Popen(command(data, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while shards(out) < wanted and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        assert wanted <= shards(out) < total
    assert kills == 2
    run(data, out)
    assert_same(out, whole)


def test_a_dry_run_says_what_it_would_write(data: Path, whole: Path, tmp_path: Path) -> None:
    said = run(data, tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    written = sum(value.nbytes for file in whole.glob("*.safetensors") for value in load_file(str(file)).values())
    assert f"{written} bytes" in said
    assert f"in {shards(whole)} shards" in said
