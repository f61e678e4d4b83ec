"""Workers that share a capture write what one run would, whichever of them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from insitu import ArgumentError, Captured, CaptureError, PromptError
from insitu.dataset import distributed

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'insitu[ray]'")

pytestmark = [pytest.mark.in_process, pytest.mark.slow]
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}
SETTINGS: dict[str, Any] = {"at": "resid_post[1:3]", "shard_bytes": 10_000, "window_tokens": 30, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def shared(folder: str, data: Any, out: Path, **settings: Any) -> Any:
    model = insitu.VLLM(folder, **ENGINE)
    return insitu.capture(model, data, out=out, ray="local", **{"workers": 2, **SETTINGS, **settings})


def assert_same(one: Captured, other: Captured) -> None:
    assert one.places == other.places
    for place in one.places:
        for mine, theirs in zip(one[place], other[place], strict=True):
            assert mine[:4] == theirs[:4]
            torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=1e-5)


def test_two_workers_of_which_one_is_lost(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    data = [{"id": f"row {number}", "text": text} for number, text in enumerate(["", *texts, *texts])]
    alone = insitu.capture(model, data, out=tmp_path / "alone", **SETTINGS)
    rows, killed, pids = tmp_path / "rows", tmp_path / "killed", tmp_path / "pids"
    pids.mkdir()

    def noted(value: torch.Tensor) -> torch.Tensor:
        (pids / str(os.getpid())).touch()
        with rows.open("a") as file:
            file.write("row\n")
        if len(rows.read_text()) > 30 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    found = shared(folder, data, tmp_path / "out", apply=noted)
    assert killed.exists()
    assert len(list(pids.iterdir())) == 3  # two workers, and one in the place of that which was lost
    assert found.manifest["prompts"] == len(data)
    others = {file.name for file in (tmp_path / "out").iterdir() if not file.name.startswith("shard-")}
    assert others == {"manifest.json", ".lock"}
    for place in alone.places:
        for mine, theirs in zip(found[place], alone[place], strict=True):
            assert (mine.id, mine.tokens) == (theirs.id, theirs.tokens)
            torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=1e-5)


def test_shards_become_those_of_one_capture_whenever_that_was_stopped(
    model: Any, folder: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = insitu.capture(model, texts, out=tmp_path / "alone", **SETTINGS)
    put, out = distributed.put, tmp_path / "out"

    def stopped(place: Path, name: str, write: Any) -> None:
        if name == "shard-00002.parquet":
            raise KeyboardInterrupt
        put(place, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "put", stopped)
        with pytest.raises(KeyboardInterrupt):
            shared(folder, texts, out)
    with pytest.raises(CaptureError, match="with `ray`"):
        insitu.capture(model, texts, out=out, **SETTINGS)
    with pytest.raises(CaptureError, match="this data has 10"):
        shared(folder, texts[1:], out)
    found = shared(folder, texts, out)
    assert_same(found, alone)
    assert [file.name for file in sorted(out.glob("shard-*.parquet"))] == [
        f"shard-{number:05d}.parquet" for number in range(found.manifest["shards"])
    ]
    assert_same(insitu.capture(model, texts, out=out, **SETTINGS), alone)  # complete: it runs nothing
    with pytest.raises(CaptureError, match="is complete"):
        shared(folder, texts, out)


def test_what_a_worker_refuses_is_raised_here(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="prompt '1'"):
        shared(folder, ["the", "the cat " * 200], tmp_path / "long", workers=1)
    with pytest.raises(ArgumentError, match="not built yet"):
        insitu.capture(model, texts, out=tmp_path / "built", ray="local", **SETTINGS)


def test_an_address_that_lets_nobody_in_is_told(folder: str, tmp_path: Path) -> None:
    arguments = {"at": "resid_post[1]", "out": str(tmp_path / "out"), "ray": "nonsense"}
    code = f"import insitu\ninsitu.capture(insitu.VLLM({folder!r}), ['one'], **{arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ArgumentError: ray: there is no cluster at 'nonsense'" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr
    assert not (tmp_path / "out").exists()
