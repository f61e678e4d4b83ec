"""vLLM's own ``vllm serve`` with insitu installed: INSITU_SERVE=1 gives it the routes, and else it is as ever."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of
from tests.engine.served import KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
ROOT = Path(__file__).resolve().parent.parent.parent
GROUP, PLUGIN = "vllm.general_plugins", "insitu.engine.server.plugin:register"
VLLM = [str(Path(sys.executable).parent / "vllm"), "serve"]
HERE = ("--host", "127.0.0.1")


def packaged(folder: Path, name: str, version: str) -> Path:
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return about


def vllm_version() -> str:
    import vllm

    return vllm.__version__.partition("+")[0] + "+cpu"  # by which it knows what it was built for


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which insitu is installed with the entry point of its pyproject, whatever is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    about = packaged(folder, "insitu-entry-points", "0")
    packaged(folder, "vllm", vllm_version())  # the `vllm` command of the CPU build asks for a package of that name
    assert f'[project.entry-points."{GROUP}"]\ninsitu = "{PLUGIN}"\n' in (ROOT / "pyproject.toml").read_text()
    (about / "entry_points.txt").write_text(f"[{GROUP}]\ninsitu = {PLUGIN}\n")
    path = [str(ROOT / "src"), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[Server]:
    made = Server("--api-key", KEY, *HERE, command=VLLM, environment={**environment, "INSITU_SERVE": "1"})
    yield made
    made.close()


def test_a_plain_vllm_serve_has_the_routes(server: Server) -> None:
    model = insitu.connect(server.url, KEY)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = model.resid_post[2].save()
    assert_close(hidden, hf_stream("llama", ids_of("llama")).resid_post[2])
    read = {"do": "read", "at": "resid_post[2]", "as": "rows"}
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "insitu": {"actions": [read]}}
    assert "rows" in server.post("/v1/completions", asked)["choices"][0]["insitu"]["saves"]
    with pytest.raises(insitu.EngineError, match="asks for a key"):
        insitu.connect(server.url)


def test_without_the_variable_it_is_as_ever(environment: dict[str, str]) -> None:
    server = Server(*HERE, command=VLLM, environment=environment)
    try:
        asked: dict[str, Any] = {"model": "tiny", "prompt": ids_of("llama"), "max_tokens": 2, "temperature": 0}
        assert server.post("/v1/completions", asked)["choices"][0]["finish_reason"] == "length"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}/insitu/v1/model")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("setting", "said"),
    [({}, "Give --api-key KEY"), ({"VLLM_USE_RUST_FRONTEND": "1"}, "server in Rust has no place for insitu's routes")],
    ids=["an address for others without a key", "a server in Rust"],
)
def test_what_can_t_be_served_is_refused_there_too(
    environment: dict[str, str], setting: dict[str, str], said: str
) -> None:
    done = subprocess.run(
        [*VLLM, models.tiny("llama"), "--port", "0"],
        env={**environment, "INSITU_SERVE": "1", **setting},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert said in done.stderr + done.stdout


def test_a_process_that_is_no_server_loads_nothing(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom vllm.plugins import load_general_plugins\nload_general_plugins()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('insitu')))"
    )
    for value in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "INSITU_SERVE": value},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert "insitu.engine.server.plugin" in done.stdout, done.stderr
        assert "insitu.engine.server.serve" not in done.stdout
