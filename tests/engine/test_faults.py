"""What becomes of those who wait when a worker process dies, when a block never ends, when a value can't travel."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

import insitu
from tests import models
from tests.engine.helpers import PROMPT, plain

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def worker() -> Any:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    return insitu.VLLM(models.tiny("llama"), engine="workers", dispatch=True, **settings)


@pytest.fixture(scope="module")
def model(in_worker: Any) -> Any:
    return in_worker


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        model.clear_edits()
        assert model.in_flight() == 0


def test_all_who_wait_are_told_that_a_worker_died(tmp_path: Path) -> None:
    begun, told = tmp_path / "begun", dict[str, Any]()

    def blocked(tracer: Any) -> None:
        begun.touch()
        time.sleep(60)

    with worker() as model:
        with model.edit() as (tracer, edit):
            model.logits.save()
        calls: dict[str, Callable[[], Any]] = {
            "run": lambda: model.run(blocked, PROMPT, **GREEDY),
            "another run": lambda: model.run(lambda tracer: model.logits, PROMPT, **GREEDY),
            "generate": lambda: model.generate(PROMPT, **GREEDY),
            "vLLM's": lambda: model.vllm_entrypoint.generate([PROMPT], SamplingParams(**GREEDY), use_tqdm=False),
        }

        def call(name: str) -> None:
            try:
                told[name] = calls[name]()
            except Exception as error:
                told[name] = error

        threads = [threading.Thread(target=call, args=(name,)) for name in calls]
        threads[0].start()
        while not begun.exists():
            time.sleep(0.05)
        for thread in threads[1:]:
            thread.start()
        (process,) = model.vllm_entrypoint.llm_engine.model_executor.workers
        os.kill(process.proc.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert {name: type(error) for name, error in told.items() if name != "vLLM's"} == {
            "run": insitu.EngineError,
            "another run": insitu.EngineError,
            "generate": insitu.EngineError,
        }
        assert isinstance(told["vLLM's"], Exception)
        assert "can't be used any more; make a new one" in str(told["run"])
        for use in (edit.clear, model.in_flight, lambda: model.generate(PROMPT)):
            with pytest.raises(insitu.EngineError, match="can't be used any more; make a new one"):
                use()


def test_an_edit_that_takes_along_what_can_t_travel_is_not_installed(model: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(insitu.ArgumentError, match=r"`lock` \(lock\) can't travel to the engine's worker process"):
        with model.edit("locked") as (tracer, edit):
            lock.acquire()
    assert model.edits() == []
    with model.edit("locked") as (tracer, edit):
        model.logits.save()
    assert edit.installed


def test_what_can_t_come_home_is_that_request_s_error(model: Any) -> None:
    with model.edit() as (tracer, _):
        rows = model.resid_post[1].shape[0]
        rows.save()
        if rows == 3:
            lock = threading.Lock().save()
    outputs = plain(model, [[5, 6, 7], [5, 6, 7, 8]], max_tokens=2)
    assert isinstance(outputs[0].error, insitu.ArgumentError)
    assert "`lock` can't come home" in str(outputs[0].error)
    assert [output.error is None for output in outputs] == [False, True]
    assert [output.saves for output in outputs] == [{"rows": 3}, {"rows": 4}]


def test_an_error_that_can_t_travel_comes_as_one_that_names_it(model: Any) -> None:
    with model.edit() as (tracer, _):

        class OddError(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise OddError("odd")
    (output,) = plain(model, [[5, 6, 7]], max_tokens=2)
    assert isinstance(output.error, Exception)
    assert "odd" in str(output.error)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("form", ["generate", "vllm_entrypoint"])
def test_ctrl_c_stops_an_edit_that_never_ends(llama: Any, form: str) -> None:
    with llama.edit() as (tracer, edit):
        while True:
            pass
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llama.generate(PROMPT, **GREEDY) if form == "generate" else plain(llama, [[5, 6, 7]])
    edit.clear()
    assert llama.in_flight() == 0
    assert plain(llama, [[5, 6, 7]], max_tokens=2)[0].error is None
