"""Both of vLLM's model runners on a GPU, compiled and with CUDA graphs: `pytest -m gpu tests/gpu`.

`VLLM_USE_V2_MODEL_RUNNER=0` takes V1, `1` or unset V2. Values are compared in bfloat16 with a float32
transformers model on the same weights; transformers' own bfloat16 error is the measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

SETTINGS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
LENGTHS = (7, 40, 129, 16, 1, 300)


@pytest.fixture(scope="module")
def model(folder: str) -> Iterator[Any]:
    import insitu

    arguments = {"dtype": "bfloat16", "max_model_len": 1024, "gpu_memory_utilization": 0.1}
    arguments |= {"kv_cache_memory_bytes": 2**30}
    with insitu.VLLM(folder, dispatch=True, skip_tokenizer_init=True, **arguments) as model:
        config = model.vllm_entrypoint.llm_engine.vllm_config
        assert not config.model_config.enforce_eager
        assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        yield model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 2048, (length,), generator=generator).tolist() for length in LENGTHS]


def paths(model: Any) -> tuple[int, int]:
    stats = model.stats()
    return stats.eager_steps, stats.plain_steps


def test_values_are_as_near_to_float32_as_transformers_own(model: Any, folder: str, prompts: list[list[int]]) -> None:
    from transformers import LlamaForCausalLM

    with model.trace(**SETTINGS) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                streams = list(model.resid_post).save()
    oracles = [
        LlamaForCausalLM.from_pretrained(folder, dtype=dtype).cuda() for dtype in (torch.float32, torch.bfloat16)
    ]
    for prompt, ours in zip(prompts, streams, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt]).cuda()
            exact, rounded = [oracle(ids, output_hidden_states=True).hidden_states[1:-1] for oracle in oracles]
        for mine, want, theirs in zip(ours, exact, rounded, strict=False):
            assert mine.shape == want[0].shape
            own = (theirs[0].float() - want[0]).abs().max()
            assert (mine.cuda().float() - want[0]).abs().max() <= 1.5 * own + 1e-3 * want.abs().max()


def test_a_block_that_reads_the_prompt_costs_one_eager_step(model: Any, prompts: list[list[int]]) -> None:
    eager, plain = paths(model)
    with model.trace(prompts[0], **SETTINGS):
        hidden = model.model.layers[3].output[0].save()
    assert hidden.shape == (len(prompts[0]), 512)
    assert paths(model)[0] - eager == 1
    assert paths(model)[1] - plain >= 11


def test_a_block_that_reads_every_step_makes_every_step_eager(model: Any, prompts: list[list[int]]) -> None:
    eager, _ = paths(model)
    with model.trace(**SETTINGS) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows, tokens = [].save(), [].save()
                for _ in tracer.iter[:]:
                    rows.append(model.model.layers[3].output[0])
                    tokens.append(model.samples.item())
                result = tracer.result.save()
    assert paths(model)[0] - eager == 12
    for prompt, seen, drawn, output in zip(prompts, rows, tokens, result, strict=True):
        assert [one.shape[0] for one in seen] == [len(prompt)] + [1] * 11
        assert drawn == list(output.outputs[0].token_ids)


def test_logits_and_samples_leave_the_graphs_on(model: Any, prompts: list[list[int]]) -> None:
    eager, _ = paths(model)
    with model.trace(prompts[1], **SETTINGS) as tracer:
        model.logits[:, 5] = torch.inf
        model.samples
        tracer.next()
        model.samples[:] = 77
        result = tracer.result.save()
    assert list(result.outputs[0].token_ids[:2]) == [5, 77]
    assert paths(model)[0] == eager


def test_an_edit_reaches_its_own_request_only(model: Any, prompts: list[list[int]]) -> None:
    def logits(edited: bool) -> list[Any]:
        with model.trace(**SETTINGS) as tracer:
            for number, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    # Read in both, so that both are eager: compiled ones round otherwise, by 0.03 here.
                    hidden = model.model.layers[2].mlp.output
                    if edited and number % 2:
                        hidden[:] = 0
                    seen = model.logits.save()
        return seen

    for number, (before, after) in enumerate(zip(logits(False), logits(True), strict=True)):
        difference = (before - after).abs().max() / before.abs().max()
        assert difference > 0.1 if number % 2 else difference < 0.02


def test_stop_errors_and_nothing_left(model: Any, prompts: list[list[int]]) -> None:
    with model.trace(prompts[0], **{**SETTINGS, "max_tokens": 50}) as tracer:
        for step in tracer.all():
            if step == 3:
                tracer.stop()
        result = tracer.result.save()
    assert len(result.outputs[0].token_ids) == 4
    assert result.outputs[0].finish_reason == "stop"
    with pytest.raises(ZeroDivisionError):
        with model.trace(prompts[0], **SETTINGS):
            1 / 0
    assert model.in_flight() == 0


def test_the_logprobs_of_an_id_written_are_the_models(model: Any, prompts: list[list[int]]) -> None:
    with model.trace(**{**SETTINGS, "max_tokens": 2}, logprobs=2) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                first = model.logits[0].float().log_softmax(-1).save()
                if number % 2:
                    model.samples[:] = 77
                result = tracer.result.save()
    for number, (wanted, output) in enumerate(zip(first, result, strict=True)):
        token, scores = output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]
        assert token == (77 if number % 2 else wanted.argmax())
        assert set(scores) == {token, *wanted.topk(2).indices.tolist()}
        assert scores[token].logprob == pytest.approx(wanted[token].item(), abs=1e-3)
        assert scores[token].rank == int((wanted >= wanted[token]).sum())


def test_prompts_that_fill_steps_take_no_more_of_them(model: Any) -> None:
    config = model.vllm_entrypoint.llm_engine.vllm_config.scheduler_config
    count = config.max_num_batched_tokens // 512
    if count > config.max_num_seqs or config.max_num_batched_tokens % 512:
        pytest.skip("steps of another size")
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, 2048, (3 * count, 512), generator=generator).tolist()
    before = paths(model)
    found = model.run(lambda tracer: model.resid_post[2][-1], prompts, **SETTINGS | {"max_tokens": 1})
    eager, plain = (after - old for after, old in zip(paths(model), before, strict=True))
    assert (eager, plain) == (3, 0)
    for number in (0, count, 3 * count - 1):
        alone = model.run(lambda tracer: model.resid_post[2][-1], prompts[number], **SETTINGS | {"max_tokens": 1})
        assert (found[number].float() - alone.float()).norm() < 0.03 * alone.float().norm()
