"""The standard names mean on every architecture what they mean in transformers, read and written."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.architectures.configs import ARCHITECTURES, EXPERTS, LAYERS
from tests.architectures.found import write_down
from tests.architectures.reference import Streams, streams
from tests.architectures.tiny import tiny
from tests.engine.helpers import BOUND, PROMPT, assert_close, difference

OF_MODEL = ("embed", "pos_embed")
OF_LAYER = ("resid_pre", "attn_out", "resid_mid", "router_logits", "mlp_out", "resid_post")
LAST = LAYERS - 1


def computed(name: str, layer: int | None, key: str) -> bool:
    """Whether an architecture computes a name, by its entry here and transformers' modules."""
    if key == "router_logits":
        return layer in hf(name).layers.get(key, {})
    return key not in ARCHITECTURES[name].absent


def ids_of(name: str) -> list[int]:
    return models.encode(tiny(name), PROMPT)


@functools.lru_cache(maxsize=1)
def hf(name: str) -> Streams:
    return streams(name, ids_of(name))


def read(model: Any, key: str, layer: int | None) -> torch.Tensor:
    return getattr(model, key) if layer is None else getattr(model, key)[layer]


@functools.lru_cache(maxsize=1)
def everything(name: str, model: Any) -> dict[tuple[str, int | None], torch.Tensor]:
    """Every value that the architecture has a name for, all from one request."""
    places = [(key, None) for key in OF_MODEL if computed(name, None, key)]
    places += [(key, layer) for layer in range(LAYERS) for key in OF_LAYER if computed(name, layer, key)]
    if computed(name, None, "final_norm"):
        places.append(("final_norm", None))

    def block(tracer: Any) -> dict[tuple[str, int | None], torch.Tensor]:
        found = {place: read(model, *place) for place in places}
        return {**found, ("logits", None): model.logits}

    return model.run(block, PROMPT, temperature=0.0, max_tokens=1)


def test_every_name_is_the_value_of_transformers(name: str, model: Any) -> None:
    wanted, differences = hf(name), {}
    for (key, layer), value in everything(name, model).items():
        reference = wanted[key, layer]
        differences[key, layer] = difference(value, reference[-1:] if key == "logits" else reference)
    describe(name, model, max(differences.values()))
    assert {place: found for place, found in differences.items() if found > BOUND} == {}
    assert len(model.resid_post) == LAYERS


def describe(name: str, model: Any, largest: float) -> None:
    worker = model.vllm_entrypoint.llm_engine.model_executor.driver_worker
    root, architecture = worker.get_model(), ARCHITECTURES[name]
    kind = type(root).__name__
    measured = {
        "model class": f"{kind} ({type(root.model).__name__})" if kind.startswith("Transformers") else kind,
        "layers": LAYERS,
        "largest difference": largest,
        "resid_mid": "resid_mid" not in architecture.absent,
        "router_logits": architecture.has_experts,
        "note": architecture.note,
    }
    write_down(name, measured)


def test_what_is_added_adds_up_to_the_stream(name: str, model: Any) -> None:
    found = everything(name, model)
    for i in range(LAYERS):
        middle = found["resid_pre", i] + found["attn_out", i]
        if ("resid_mid", i) in found:
            assert_close(middle, found["resid_mid", i], f"resid_mid[{i}]", 1e-6)
        if ("mlp_out", i) in found and name != "opt_post_norm":
            assert_close(middle + found["mlp_out", i], found["resid_post", i], f"resid_post[{i}]", 1e-6)
        if i < LAST:
            assert found["resid_post", i].equal(found["resid_pre", i + 1])


def test_unembedding_the_final_norm_gives_the_logits(name: str, model: Any) -> None:
    if not computed(name, None, "final_norm"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            every = model.unembed(model.model.decoder.output).save()
            logits = model.logits.save()
    else:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            by_hand = model.apply_final_norm(model.resid_post[-1]).save()
            final_norm = model.final_norm.save()
            every = model.unembed(final_norm).save()
            logits = model.logits.save()
        assert_close(by_hand, final_norm, "apply_final_norm", 1e-6)
    assert_close(every[-1:], logits, "the engine's own logits", 1e-6)
    assert_close(every, hf(name)["logits", None], "logits")


def test_names_that_are_not_computed_say_so(name: str, model: Any) -> None:
    for key in ARCHITECTURES[name].absent:
        layer = 1 if key in OF_LAYER else None
        with pytest.raises(insitu.LocationError, match=f"`model.{key}` is not computed by "):
            model.run(lambda tracer, place=(key, layer): read(model, *place), PROMPT, max_tokens=1)
    if "final_norm" in ARCHITECTURES[name].absent:
        with pytest.raises(insitu.LocationError, match="final_norm"):
            model.run(lambda tracer: model.apply_final_norm(model.resid_post[1]), PROMPT, max_tokens=1)
    for layer in range(LAYERS):
        if ARCHITECTURES[name].has_experts and not computed(name, layer, "router_logits"):
            with pytest.raises(insitu.LocationError, match=rf"layers\.{layer}` has no experts"):
                model.run(lambda tracer, i=layer: model.router_logits[i], PROMPT, max_tokens=1)


def test_each_decoded_token_is_a_row_of_the_stream(name: str, model: Any) -> None:
    keys = [key for key in ("resid_pre", "attn_out", "mlp_out", "resid_post") if computed(name, 1, key)]
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        steps = [].save()
        for _ in tracer.iter[:]:
            steps.append([read(model, key, 1) for key in keys])
        result = tracer.result.save()
    ids = [*ids_of(name), *result.outputs[0].token_ids[:-1]]
    wanted = streams(name, ids)
    assert [rows[0].shape[0] for rows in steps] == [len(ids_of(name)), 1, 1]
    for key, rows in zip(keys, zip(*steps, strict=True), strict=True):
        assert_close(torch.cat(rows), wanted[key, 1], key)


def test_modules_have_no_batch_axis(name: str, model: Any) -> None:
    """Not even where vLLM runs transformers' own code, whose tensors have one."""
    layer = model.get(layers_of(model))[1]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            output = layer.output.save()
        with tracer.invoke(PROMPT):
            layer.output = twice(layer.output)
            written = model.resid_post[1].save()
    stream = everything(name, model)["resid_post", 1]
    assert first(output).shape == stream.shape
    assert_close(written, 2 * stream)


def layers_of(model: Any) -> str:
    paths = (
        "transformer.h",
        "transformer.blocks",
        "gpt_neox.layers",
        "model.decoder.layers",
        "model.layers",
        "model.h",
    )
    return next(path for path in paths if has(model, path))


def has(model: Any, path: str) -> bool:
    try:
        return len(model.get(path)) > 0
    except insitu.UnknownModuleError:
        return False


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def twice(output: Any) -> Any:
    """The stream doubled, be it in two parts; what else a layer returns as it is."""
    if isinstance(output, torch.Tensor):
        return output * 2
    return tuple(part * 2 if isinstance(part, torch.Tensor) else part for part in output)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value * 0.5 + 0.25


def some_rows(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[1:3] = 1.0 - value[1:3] * 0.5
    return value


def write(model: Any, key: str, layer: int | None, edit: Any) -> None:
    """A whole value by assignment, some rows in place."""
    if edit is some_rows:
        value = read(model, key, layer)
        value[1:3] = 1.0 - value[1:3] * 0.5
    elif layer is None:
        setattr(model, key, whole(read(model, key, layer)))
    else:
        getattr(model, key)[layer] = whole(read(model, key, layer))


def test_writes_equal_the_same_edits_in_transformers(name: str, model: Any) -> None:
    keys = [key for key in (*OF_MODEL, "final_norm") if computed(name, None, key)]
    places = [(key, None) for key in keys] + [(key, 1) for key in OF_LAYER if computed(name, 1, key)]
    cases = [(key, layer, edit) for key, layer in places for edit in (whole, some_rows)]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            plain = [model.resid_post[-1], model.logits].save()
        for key, layer, edit in cases:
            with tracer.invoke(PROMPT):
                if key != "final_norm":
                    write(model, key, layer, edit)
                last = model.resid_post[-1].save()
                if key == "final_norm":
                    write(model, key, layer, edit)
                logits = model.logits.save()
    assert_close(plain[0], hf(name)["resid_post", LAST], "company")
    assert_close(plain[1], hf(name)["logits", None][-1:], "company")
    for case, found, drawn in zip(cases, last, logits, strict=True):
        what = f"{case[0]}, {case[2].__name__}"
        wanted = streams(name, ids_of(name), case)
        assert_close(found, wanted["resid_post", LAST], what)
        assert_close(drawn, wanted["logits", None][-1:], what)
        if case[0] != "final_norm":
            assert difference(found, plain[0]) > 1e-4, f"{what} changed nothing"


def test_an_expert_whose_router_logits_are_minus_infinity_is_never_chosen(name: str, model: Any) -> None:
    if not ARCHITECTURES[name].has_experts:
        with pytest.raises(insitu.LocationError, match="it has no experts"):
            model.run(lambda tracer: model.router_logits[1], PROMPT, max_tokens=1)
        return
    logits = everything(name, model)["router_logits", 1]
    assert logits.shape == (len(ids_of(name)), EXPERTS)
    for expert in range(EXPERTS):
        without = functools.partial(minus_infinity, expert=expert)
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            without(model.router_logits[1])
            edited = model.resid_post[1].save()
        assert_close(edited, streams(name, ids_of(name), ("router_logits", 1, without))["resid_post", 1])
        chosen = (logits.topk(2).indices == expert).any(-1)
        plain = everything(name, model)["resid_post", 1]
        changed = ~torch.isclose(edited, plain, atol=1e-4).all(-1)
        assert changed[chosen].all()


def minus_infinity(logits: torch.Tensor, expert: int) -> torch.Tensor:
    logits[:, expert] = float("-inf")
    return logits
