"""Nothing is left behind, whatever way a trace ends, and nobody else is touched."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import psutil
import pytest
from vllm import SamplingParams

import insitu

pytestmark = pytest.mark.in_process

GREEDY = {"temperature": 0.0, "max_tokens": 4}


def plain(model: Any, prompt: str) -> list[int]:
    (output,) = model.vllm_entrypoint.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(autouse=True)
def nothing_left(llama: Any):
    yield
    assert llama.in_flight() == 0
    assert not llama.vllm_entrypoint.llm_engine.has_unfinished_requests()
    trunk = llama.vllm_entrypoint.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    assert not [path for path, module in trunk.named_modules() if "forward" in module.__dict__]


def test_in_flight_counts_running_traces_only(llama: Any) -> None:
    assert llama.in_flight() == 0
    with llama.trace("hello there", **GREEDY):
        during = llama.in_flight().save()
    assert during == 1
    assert llama.in_flight() == 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("k"),
        SystemExit(3),
        KeyboardInterrupt(),
        AssertionError(),
        GeneratorExit(),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_one_block_reaches_the_caller_and_no_other_request(llama: Any, error: BaseException) -> None:
    texts = [plain(llama, prompt) for prompt in ("one two", "hello there", "a b c", "the end")]
    with pytest.raises(type(error)) as caught, llama.trace(**GREEDY) as tracer:
        results = [None] * 4
        results.save()
        for i, prompt in enumerate(("one two", "hello there", "a b c", "the end")):
            with tracer.invoke(prompt):
                llama.model.layers[1].output
                if i == 2:
                    raise error
                results[i] = tracer.result
    if isinstance(error, KeyboardInterrupt):
        return  # the user wants everything to stop
    assert caught.value.invoke == 2
    assert [list(r.outputs[0].token_ids) for r in results if r] == [texts[0], texts[1], texts[3]]
    assert plain(llama, "a b c") == texts[2]


def test_the_traceback_shows_the_user_s_lines_only(llama: Any) -> None:
    def helper(value):
        return value[99]

    with pytest.raises(IndexError) as caught, llama.trace("hello there", **GREEDY):
        hidden = llama.model.layers[1].output[0]
        helper(hidden)
    lines = [entry.name for entry in caught.traceback]
    files = {os.path.basename(str(entry.path)) for entry in caught.traceback}
    assert files == {"test_lifecycle.py"}
    assert lines[-1] == "helper"
    assert caught.value.__context__ is None
    assert "helper(hidden)" in str(caught.traceback[-2].statement)


def test_values_saved_before_an_error_are_bound(llama: Any) -> None:
    early = None
    with pytest.raises(ZeroDivisionError), llama.trace("hello there", **GREEDY):
        early = llama.model.layers[0].output[0].save()
        1 / 0
    assert early is not None
    assert early.shape[1] == 128


def test_a_failed_request_ends_early(llama: Any) -> None:
    before = llama.stats()
    with pytest.raises(ZeroDivisionError):
        with llama.trace("hello there", temperature=0.0, max_tokens=100, ignore_eos=True):
            1 / 0
    after = llama.stats()
    assert after.eager_steps + after.plain_steps - before.eager_steps - before.plain_steps == 1


@pytest.fixture
def interruptible():
    """A process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_between_steps_aborts_and_the_engine_lives(llama: Any) -> None:
    text = plain(llama, "hello there")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        with llama.trace(temperature=0.0, max_tokens=200, ignore_eos=True) as tracer:
            for _ in range(64):
                with tracer.invoke("hello there"):
                    tracer.result
    assert llama.in_flight() == 0
    assert plain(llama, "hello there") == text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_a_block_that_never_ends(llama: Any) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), llama.trace("hello there", **GREEDY):
        while True:
            pass


def test_a_request_aborted_by_someone_else_is_an_error(llama: Any) -> None:
    engine = llama.vllm_entrypoint.llm_engine
    with pytest.raises(insitu.RequestError, match="aborted"):
        with llama.trace("hello there", temperature=0.0, max_tokens=50):
            engine.abort_request(list(engine.output_processor.request_states), True)
            llama.logits


def test_requests_that_know_nothing_of_insitu_run_beside_and_are_not_lost(llama: Any) -> None:
    text = plain(llama, "one two")
    llm = llama.vllm_entrypoint
    llm.enqueue(["one two", "one two"], SamplingParams(**GREEDY), use_tqdm=False)
    with llama.trace("hello there", **GREEDY) as tracer:
        hidden = llama.model.layers[1].output[0].save()
        result = tracer.result.save()
    assert hidden.shape[0] == len(result.prompt_token_ids)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [text, text]


def test_a_trace_from_another_thread(llama: Any) -> None:
    found = []

    def work():
        with llama.trace("hello there", **GREEDY):
            hidden = llama.model.layers[1].output[0].save()
        found.append(hidden.shape)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3


def test_vllm_s_own_generate_in_another_thread_takes_turns_with_traces(llama: Any) -> None:
    llm = llama.vllm_entrypoint
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    wanted = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    settings = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    with llama.trace("hello there", **settings) as tracer:
        alone = tracer.result.save()
    found: list[list[list[int]]] = []

    def work() -> None:
        for _ in range(4):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        with llama.trace("hello there", **settings) as tracer:
            steps = [].save()
            for step in tracer.iter[:]:
                steps.append(llama.resid_post[1].shape[0])
            result = tracer.result.save()
        assert steps == [len(alone.prompt_token_ids), 1, 1, 1, 1]
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
    thread.join()
    assert found == [wanted] * 4
    assert llama.in_flight() == 0


@pytest.mark.slow
def test_300_traces_leave_memory_flat(llama: Any) -> None:
    process = psutil.Process()

    def traces(count: int) -> int:
        for _ in range(count):
            with llama.trace("hello there", temperature=0.0, max_tokens=2):
                hidden = llama.model.layers[2].output[0].save()
                logits = llama.logits.save()
        assert logits.shape[0] == 1
        return process.memory_info().rss

    gc.collect()
    gc.disable()
    try:
        traces(50)
        after_100 = traces(50)
        after_300 = traces(200)
    finally:
        gc.enable()
    print(f"resident: {after_100 / 2**20:.1f} MiB after 100 traces, {after_300 / 2**20:.1f} MiB after 300")
    assert after_300 - after_100 < 4 * 2**20


def test_a_closed_model_refuses_and_gives_its_memory_back(tiny_folder: Any) -> None:
    with insitu.VLLM(tiny_folder("llama"), dtype="float32", enforce_eager=True, max_model_len=64) as model:
        with model.trace("hello", max_tokens=1):
            logits = model.logits.save()
        assert logits.dim() == 2
    assert not model.dispatched
    assert "closed" in repr(model)
    with pytest.raises(insitu.EngineError, match="was closed"):
        model.trace("hello")
