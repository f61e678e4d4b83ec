"""``keep_on="device"``: what is saved stays where the engine has it, and is the caller's alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from insitu.block import ArgumentError
from insitu.run.home import tensors_within

pytestmark = pytest.mark.in_process

GREEDY = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [19, 20]]


def places(model: Any) -> dict[str, Any]:
    """Everything that a block may hold which the engine could write over."""
    return {
        "embed": model.embed,
        "streams": [model.resid_post[0], model.mlp_out[1], model.resid_post[1][-1]],
        "view": model.resid_post[1][1:],
        "logits": model.logits,
        "samples": model.samples,
    }


def every_step(model: Any) -> Any:
    return lambda tracer: [model.resid_post[1] for _ in tracer.iter[:]]


def steps_on(model: Any) -> None:
    """Other requests, over whatever memory the engine uses again."""
    model.generate([[3, 4, 5, 6, 7, 8, 9]] * 8, temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("count", [1, 3, 5], ids=["one", "each alone", "together"])
@pytest.mark.parametrize("way", [lambda model: lambda tracer: places(model), every_step], ids=["places", "every step"])
def test_values_are_those_that_come_home_and_stay_as_they_are(model: Any, count: int, way: Any) -> None:
    home = model.run(way(model), PROMPTS[:count], **GREEDY)
    kept = model.run(way(model), PROMPTS[:count], keep_on="device", **GREEDY)
    (device,) = model.vllm_entrypoint.collective_rpc(lambda worker: worker.device)
    found, wanted = list(tensors_within(kept)), list(tensors_within(home))
    assert len(found) == len(wanted) > 0
    before = [each.clone() for each in found]
    steps_on(model)
    for one, other, then in zip(found, wanted, before, strict=True):
        assert one.device == device
        assert not one.is_inference()
        assert torch.equal(one, other)
        assert torch.equal(one, then)


def test_no_two_share_memory_and_none_holds_more_than_its_own(model: Any) -> None:
    kept = model.run(lambda tracer: places(model), PROMPTS, keep_on="device", **GREEDY)
    tensors = list(tensors_within(kept))
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == len(tensors)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)


def test_a_kept_value_is_not_what_an_edit_of_a_later_place_changes(model: Any) -> None:
    with model.trace(PROMPTS[0], keep_on="device", **GREEDY):
        before = model.resid_post[0].save()
        model.resid_post[1][:] *= 0
        after = model.resid_post[1].save()
    with model.trace(PROMPTS[0], **GREEDY):
        plain = model.resid_post[0].save()
    assert torch.equal(before, plain)
    assert not after.any()


def test_what_invokes_put_into_a_list_of_the_trace_is_kept_too(llama: Any) -> None:
    with llama.trace(keep_on="device", **GREEDY) as tracer:
        values = [].save()
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                values.append(llama.resid_post[0])
    steps_on(llama)
    wanted = llama.run(lambda tracer: llama.resid_post[0], PROMPTS, **GREEDY)
    assert sorted(each.sum().item() for each in values) == sorted(each.sum().item() for each in wanted)


def test_other_values_and_places_are_refused(llama: Any) -> None:
    with pytest.raises(ArgumentError, match="keep_on='cuda': it is 'device', or left out"):
        llama.trace("The", keep_on="cuda")
    with pytest.raises(ArgumentError, match="keep_on: with `serve` values come from a server"):
        llama.trace("The", keep_on="device", serve="http://127.0.0.1:9")
    with pytest.raises(ArgumentError, match="`keep_on`: it is for a whole trace"), llama.trace() as tracer:
        with tracer.invoke("The", keep_on="device"):
            pass


@pytest.mark.slow
def test_workers_refuse_it(in_worker: Any) -> None:
    with pytest.raises(ArgumentError, match="keep_on='device': this model runs in worker processes"):
        in_worker.trace("The", keep_on="device")
    assert in_worker.in_flight() == 0
