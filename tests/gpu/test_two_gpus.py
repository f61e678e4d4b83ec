"""Two GPUs under tensor parallelism: blocks see and do what they see and do on one, within bfloat16's rounding.

`pytest -m gpu tests/gpu/test_two_gpus.py`; `VLLM_USE_V2_MODEL_RUNNER=0` takes V1. One token alone is allowed, so
that rounding can't lead two engines apart.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine import test_taps
from tests.engine.cohorts import alone_and_together, counted, same
from tests.engine.taps import PLACES
from tests.gpu import ranks
from tests.gpu.ranks import BLOCKS, VOCABULARY, experts, largest_difference, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(280, method="thread"),
]

SETTINGS = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False, "allowed_token_ids": [77]}
ENGINE = {
    "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 320, "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**30, "skip_tokenizer_init": True, "dispatch": True,
}  # fmt: skip
BOUND, STAGED_BOUND = 0.08, 0.02
PROMPTS = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 7, 129, 1)
]


KINDS = ["mixtral", "staged mixtral", "llama", "staged llama", "qwen3", "tapped llama"]
"""vLLM wants an engine of a mixture of experts to be the first of its process."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    name = kind.rpartition(" ")[2]
    folder = str(tmp_path_factory.mktemp(name))
    ranks.save_model(name, folder)
    return folder


@pytest.fixture(scope="module")
def engines(kind: str, folder: str) -> Iterator[tuple[Any, Any]]:
    """On two GPUs, by ranks or by stages, and on one. Llama's are compiled, with CUDA graphs."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # CUDA is in use in this process
    way, _, name = kind.rpartition(" ")
    settings = {**ENGINE, "enforce_eager": name != "llama"}
    several = "pipeline_parallel_size" if way == "staged" else "tensor_parallel_size"
    taps = PLACES if kind == "tapped llama" else ()
    with (
        insitu.VLLM(folder, **settings) as one,
        insitu.VLLM(folder, **settings, **{several: 2}, taps=taps) as two,
    ):
        yield two, one


@pytest.fixture(scope="module")
def model(engines: tuple[Any, Any]) -> Any:
    return engines[0]


@pytest.fixture(autouse=True)
def nothing_left(engines: tuple[Any, Any]) -> Iterator[None]:
    yield
    assert [each.in_flight() for each in engines] == [0, 0]


def compare(
    engines: tuple[Any, Any], block: Callable[[Any, Any], Any], what: str, prompts: Any = PROMPTS, steps: int = 3
) -> None:
    settings = {**SETTINGS, "max_tokens": steps}
    ours, wanted = [each.run(functools.partial(block, each), prompts, **settings) for each in engines]
    print(f"{what}: {largest_difference(ours, wanted, what, bound_of(engines)):.1e}")


def bound_of(engines: tuple[Any, Any]) -> float:
    """Stages add up nothing in another order than one GPU does."""
    config = engines[0].vllm_entrypoint.llm_engine.vllm_config.parallel_config
    return STAGED_BOUND if config.pipeline_parallel_size > 1 else BOUND


def streams(model: Any, tracer: Any) -> dict[str, torch.Tensor]:
    found = {"embed": model.embed}
    for i in range(ranks.LAYERS):
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            found[f"{name}[{i}]"] = getattr(model, name)[i]
    return found | {"final_norm": model.final_norm, "logits": model.logits}


def test_two_are_as_near_to_float32_as_one(engines: tuple[Any, Any], kind: str, folder: str) -> None:
    """The yardstick for what two GPUs and one differ by: the error that each has against transformers in float32."""
    oracle = models.oracle(folder)
    worst = {"one": 0.0, "two": 0.0, "apart": 0.0, "ratio": 0.0}
    for prompt in PROMPTS[:3]:
        wanted = vars(models.hf_residuals(oracle, prompt))
        two, one = [each.run(functools.partial(streams, each), prompt, **SETTINGS) for each in engines]
        for place in two:
            name, _, layer = place.partition("[")
            true = wanted[name][int(layer[:-1])] if layer else wanted[name][-len(two[place]) :]
            size = true.norm()
            a, b = ((each[place].float() - true).norm() / size for each in (one, two))
            apart = (two[place].float() - one[place].float()).norm() / size
            assert b <= 1.5 * a + 1e-3, f"{place}: one GPU is {a:.2g} from float32, two are {b:.2g}"
            found = {"one": a, "two": b, "apart": apart, "ratio": b / a.clamp(min=1e-3)}
            worst = {key: max(worst[key], value.item()) for key, value in found.items()}
    print(f"{kind}, against float32: {', '.join(f'{key} {value:.1e}' for key, value in worst.items())}")


def test_every_module(engines: tuple[Any, Any], kind: str) -> None:
    compare(engines, lambda model, tracer: tracer.cache(inputs=True), f"{kind}, all modules", PROMPTS[0])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_a_block(engines: tuple[Any, Any], kind: str, block: Callable[[Any, Any], Any]) -> None:
    compare(engines, block, f"{kind}, {block.__name__}")


def test_experts(engines: tuple[Any, Any], kind: str) -> None:
    if "mixtral" not in kind:
        pytest.skip("has none")
    compare(engines, experts, "experts")


def test_twenty_runs_are_identical(model: Any) -> None:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.model.layers[1].self_attn.qkv_proj.output[0][:, 100:900] *= 1.5
            seen += [model.resid_post[1], model.q[2], model.attn_pattern[3], model.logits]
        return seen

    first, *others = [tensors_of(model.run(block, PROMPTS, **SETTINGS)) for _ in range(20)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_block_may_draw_what_it_reads(model: Any) -> None:
    def block(tracer: Any) -> Any:
        read = []
        for _ in tracer.iter[:]:
            for i, layer in enumerate(model.model.layers):
                if random.random() < 0.5:
                    layer.self_attn.attn.output[:] *= random.random()
                    read.append(i)
                if random.random() < 0.3:
                    model.unembed(model.resid_post[i])
        return len(read)

    for _ in range(5):
        assert len(model.run(block, PROMPTS * 3, **SETTINGS)) == 12


def test_an_error_in_a_block_is_its_own(engines: tuple[Any, Any]) -> None:
    model = engines[0]
    found = []
    with pytest.raises(ZeroDivisionError) as caught, model.trace(**SETTINGS) as tracer:
        seen = [].save()
        with tracer.invoke(PROMPTS[0]):
            seen.append(model.resid_post[1])
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[1].self_attn.qkv_proj.output[0][:] = 1 / 0
        with tracer.invoke(PROMPTS[2]):
            seen.append(model.resid_post[1])
    assert caught.value.invoke == 1
    for prompt in (PROMPTS[0], PROMPTS[2]):
        found.append(engines[1].run(lambda tracer: engines[1].resid_post[1], prompt, **SETTINGS))
    largest_difference(sorted(seen, key=len), sorted(found, key=len), "beside an error", bound_of(engines))
    with pytest.raises(RuntimeError, match=r"size|shape"):  # on all ranks, in a module that a block calls
        model.run(lambda tracer: model.model.layers[0].self_attn.o_proj(model.embed[:, :10]), PROMPTS[0], **SETTINGS)
    compare(engines, ranks.standard_names, "after errors")


def test_an_installed_edit_runs_beside_plain_requests(engines: tuple[Any, Any]) -> None:
    found = []
    for model in engines:
        with model.edit() as (tracer, edit):
            for _ in tracer.iter[:]:
                model.resid_post[1][:] *= 0.5
                seen = model.resid_post[3].save()
        outputs = model.generate(PROMPTS, **SETTINGS)
        found.append([output.saves["seen"] for output in outputs])
        edit.clear()
        assert model.edits() == []
    print(f"installed: {largest_difference(*found, 'an installed edit', bound_of(engines)):.1e}")


def test_a_later_stage_takes_from_an_earlier_one_and_not_the_reverse(engines: tuple[Any, Any], kind: str) -> None:
    def later(model: Any, tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            first = model.resid_post[0]
            model.resid_post[3] += 0.1 * first
            seen.append(model.logits)
        return seen

    compare(engines, later, f"{kind}, an edit of the last layer by the first")
    model = engines[0]

    def reverse(tracer: Any) -> None:
        value = model.resid_post[3]
        model.resid_post[0] += value

    with pytest.raises(insitu.OutOfOrderError, match="has gone by"):
        model.run(reverse, PROMPTS[0], **SETTINGS)
    compare(engines, ranks.standard_names, "after a refusal")


def test_requests_that_are_aborted(engines: tuple[Any, Any]) -> None:
    model = engines[0]
    engine = model.vllm_entrypoint.llm_engine
    core, steps = engine.engine_core, iter(range(1000))

    def get_output() -> Any:
        if next(steps) == 4:
            names = sorted(engine.output_processor.request_states, key=lambda name: int(name.split("-")[0]))
            engine.abort_request(names[::2], internal=True)
        return type(core).get_output(core)

    core.get_output = get_output
    try:
        with pytest.raises(Exception, match="2 of 4") as caught:
            with model.trace(**{**SETTINGS, "max_tokens": 8}) as tracer:
                rows = [].save()
                for prompt in PROMPTS:
                    with tracer.invoke(prompt):
                        rows.append([model.model.layers[1].self_attn.attn.output[-1] for _ in tracer.iter[:]])
    finally:
        del core.get_output
    found = [(error.invoke, str(error)) for error in caught.value.exceptions]
    assert found == [(i, "the request was aborted before it ended") for i in (0, 2)]
    assert [len(each) for each in rows] == [8, 8]
    compare(engines, ranks.standard_names, "after aborts")


def test_many_traced_requests_beside_untraced_ones(engines: tuple[Any, Any], kind: str) -> None:
    from vllm import SamplingParams

    model, one = engines
    generator = random.Random(0)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 40))] for _ in range(320)]
    traced, untraced = prompts[:256], [{"prompt_token_ids": prompt} for prompt in prompts[256:]]
    llm = model.vllm_entrypoint
    llm.enqueue(untraced, SamplingParams(**{**SETTINGS, "max_tokens": 12}), use_tqdm=False)

    def block(model: Any, tracer: Any) -> Any:
        return [(model.resid_post[1][-1], model.q[2][-1], model.logits) for _ in tracer.iter[:]]

    compare(engines, block, f"{kind}, 256 beside 64", traced)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 64


def reads_of_both(model: Any) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            found.append([model.resid_post[0], model.mlp_out[1][-1]])
            found.append([model.attn_out[3][-1], model.final_norm, model.logits, model.samples])
        return found

    return block


def edits_of_both(model: Any) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            early = model.resid_post[0]
            model.resid_post[1][:] *= 1.5
            model.resid_post[2][-1] *= 0.5
            model.resid_post[3] += 0.1 * early
            found.append([model.final_norm, model.logits])
        return found

    return block


@pytest.mark.parametrize("made", [reads_of_both, edits_of_both])
def test_a_block_beside_many_prompts_runs_once_on_both_stages(
    engines: tuple[Any, Any], kind: str, made: Callable[[Any], Callable[[Any], Any]]
) -> None:
    if "staged" not in kind:
        pytest.skip("is about two stages")
    model, one = engines
    generator = random.Random(1)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(2, 40))] for _ in range(256)]
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: model.run(made(model), prompts, **SETTINGS))
    assert not isinstance(together, BaseException), together
    assert counts[0] >= 250  # fewer than four that begin in a step are alone
    assert sum(counts) == 3 * 256
    assert same(alone, together)
    wanted = one.run(made(one), prompts, **SETTINGS)
    print(f"{kind}, once for 256: {largest_difference(together, wanted, made.__name__, STAGED_BOUND):.1e}")


def test_steps_in_which_nobody_waits_stay_on_graphs(model: Any, kind: str) -> None:
    before = model.stats()
    model.run(lambda tracer: model.resid_post[1], PROMPTS[0], **{**SETTINGS, "max_tokens": 12})
    after = model.stats()
    tapped = kind == "tapped llama"
    assert (after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps) == (not tapped, tapped)
    assert after.plain_steps - before.plain_steps >= 11


@pytest.mark.parametrize("block", test_taps.BLOCKS, ids=test_taps.name_of)
def test_a_block_at_taps(engines: tuple[Any, Any], kind: str, block: Callable[[Any, Any], Any]) -> None:
    if kind != "tapped llama":
        pytest.skip("has none")
    for _ in range(2):  # the second time it is known what the block does
        compare(engines, block, f"taps, {block.__name__}", PROMPTS[:2], steps=5)


def test_blocks_of_all_kinds_at_taps_in_one_batch(engines: tuple[Any, Any], kind: str) -> None:
    if kind != "tapped llama":
        pytest.skip("has none")

    def run(engine: Any) -> Any:
        with engine.trace(**{**SETTINGS, "max_tokens": 5}) as tracer:
            for i, block in enumerate(test_taps.BLOCKS):
                with tracer.invoke(PROMPTS[i % 4]):
                    value = block(engine, tracer)
                    insitu.save(value)
        return value

    for _ in range(2):
        print(f"taps, one batch: {largest_difference(*map(run, engines), 'one batch', BOUND):.1e}")


def test_reads_at_taps_leave_the_graphs_on(model: Any, kind: str) -> None:
    if kind != "tapped llama":
        pytest.skip("has none")
    for _ in range(2):
        before = model.stats()
        model.run(functools.partial(test_taps.read_streams, model), PROMPTS[0], **SETTINGS)
        after = model.stats()
    assert (after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps) == (0, 3)


VECTORS = torch.randn(256, ranks.WIDTH, generator=torch.Generator().manual_seed(3))


def own_vectors(model: Any, lengths: Sequence[int]) -> Any:
    with model.trace(**SETTINGS) as tracer:
        for number, length in enumerate(lengths):
            prompt, vector = PROMPTS[number % 4], VECTORS[number]
            with tracer.invoke([*prompt, 10 + number], max_tokens=length):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[0] *= 0.5
                    stream = model.resid_post[1]
                    stream += vector.to(stream)
                    seen.append(model.resid_post[3][-1])
                    seen.append(model.logits)
    return seen


def adds_and_scales(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        stream += torch.linspace(-2, 2, stream.shape[-1]).to(stream)
        later = model.resid_post[2]
        later *= 0.5
        seen += [model.resid_post[3], model.logits]
    return seen


def takes_a_direction_out(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        unit = torch.linspace(-1, 1, stream.shape[-1]).to(stream) / 13
        stream -= (stream @ unit).unsqueeze(-1) * unit
        seen += [stream, model.resid_post[3], model.logits]
    return seen


@pytest.mark.parametrize("lengths", [[6] * 4, [6] * 64, [2 + 7 * i % 11 for i in range(256)]], ids=[4, 64, 256])
def test_vectors_of_their_own_are_added_by_the_tables_of_both(
    engines: tuple[Any, Any], kind: str, lengths: list[int]
) -> None:
    if kind != "tapped llama":
        pytest.skip("has none")
    model, one = engines
    wanted = own_vectors(one, lengths)
    for number in range(2):
        before = model.stats()
        found = own_vectors(model, lengths)
        after = model.stats()
        print(f"vectors of their own: {largest_difference(found, wanted, 'vectors', BOUND):.1e}")
        edited = after.table_edits - before.table_edits
        print(f"{edited} rows by tables, {after.eager_steps - before.eager_steps} eager steps")
        assert edited > 0 or not number


def test_an_edit_is_done_by_the_tables_of_both_beside_untraced_requests(engines: tuple[Any, Any], kind: str) -> None:
    from vllm import SamplingParams

    if kind != "tapped llama":
        pytest.skip("has none")
    model, one = engines
    untraced = [{"prompt_token_ids": [3 + i, 9, 77]} for i in range(64)]
    llm = model.vllm_entrypoint
    for block in (adds_and_scales, takes_a_direction_out):
        for _ in range(3):  # the first times it is learnt what the block does
            llm.enqueue(untraced, SamplingParams(**{**SETTINGS, "max_tokens": 12}), use_tqdm=False)
            before = model.stats()
            compare(engines, block, f"tables, {block.__name__}", PROMPTS * 8, steps=8)
            after = model.stats()
            edited = after.table_edits - before.table_edits
            outputs = llm.wait_for_completion(use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 64
        assert edited >= 32 * 6
    assert model.in_flight() == one.in_flight() == 0
