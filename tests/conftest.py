"""Settings and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys

# Before anything imports vLLM, which reads them once.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    INSITU_CPU_KVCACHE_BYTES=str(2**27),  # room for thousands of a tiny model's tokens
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_INT4_W4A8="0",  # on CPUs with AMX vLLM rounds what 4-bit weights are multiplied with, too
    OMP_WAIT_POLICY="PASSIVE",  # spinning threads make everything several times slower on a busy machine
)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of models this small more of them take time from each other
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # vLLM does not look whether another process is writing what it has compiled.
    os.environ.setdefault("VLLM_CACHE_ROOT", os.path.expanduser(f"~/.cache/vllm/{worker}"))

from collections.abc import Callable, Iterator
from typing import Any

# Its pytest plugin would import it at the very end, while threads that vLLM left behind may log: CPython 3.11
# can't make two syntax trees at once.
import hypothesis  # noqa: F401
import pytest


@pytest.fixture(scope="session")
def tiny_folder() -> Callable[[str], str]:
    from tests import models

    return models.tiny


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Any]:
    from tests import models

    return models.oracle


@pytest.fixture(scope="session")
def smollm2_folder() -> str:
    from insitu.demo_model import demo_model

    return demo_model()


KINDS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "workers": {"engine": "workers"},
    "two-ranks": {"tensor_parallel_size": 2},
    "two-stages": {"pipeline_parallel_size": 2},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=KINDS, default="in-process", help="where the engines of the session run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--engine") in ("two-ranks", "two-stages"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"


def keep_imports() -> None:
    """What is imported by now stays. An engine's start and its end look four times through all objects that may go,
    half a second each; vLLM itself freezes them while it has an engine, and lets go of all when one ends."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def look_at_models_here() -> None:
    """vLLM looks at a class of models that it has not met on this machine in a process of its own, lest that
    touches a GPU: ten seconds of imports for each of fifty architectures."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None:
        vars(registry)["_run_in_subprocess"] = lambda function: function()


def pytest_collection_finish() -> None:
    keep_imports()
    look_at_models_here()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kind = config.getoption("--engine")
    for item in items:
        if kind != "in-process" and item.get_closest_marker("in_process"):
            item.add_marker(pytest.mark.skip(reason="is about an engine in the process of its client"))
        if kind == "two-ranks" and "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="the nine heads of SmolLM2 can't be split over two ranks"))


@pytest.fixture(scope="module")
def several_threads() -> Iterator[None]:
    """For tests of what is equal to the bit: how kernels round depends on how they share the work."""
    import torch

    before = torch.get_num_threads()  # its setter is replaced by vLLM's, which does nothing
    torch._C.set_num_threads(max(2, before))
    yield
    torch._C.set_num_threads(before)


class Engines:
    """One engine a model for the whole session, made when the first test asks for it."""

    def __init__(self, kind: str) -> None:
        self.settings = KINDS[kind]
        self.made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = self.build(name)
        return self.made[name]

    def build(self, name: str) -> Any:
        import insitu
        from insitu.demo_model import demo_model
        from tests import models

        small = name != "smollm2"
        return insitu.VLLM(
            models.tiny(name) if small else demo_model(),
            dispatch=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=16,
            kv_cache_memory_bytes=2**26 if small else 2**29,
            **self.settings,
        )

    def close(self) -> None:
        for engine in self.made.values():
            engine.close()


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    made = Engines(request.config.getoption("--engine"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def mixtral(engines: Engines) -> Any:
    return engines.get("mixtral")


@pytest.fixture(scope="session")
def llama(engines: Engines) -> Any:
    return engines.get("llama")


@pytest.fixture(scope="session")
def gpt2(engines: Engines) -> Any:
    return engines.get("gpt2")


@pytest.fixture(scope="session")
def qwen3(engines: Engines) -> Any:
    return engines.get("qwen3")


@pytest.fixture(scope="session")
def smollm2(engines: Engines) -> Any:
    return engines.get("smollm2")
