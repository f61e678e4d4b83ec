"""Recipes compute what their papers say: against transformers with hooks, and what is known of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from insitu import ArgumentError
from insitu.recipes import (
    SparseAutoencoder,
    Steering,
    ablate,
    ablate_features,
    attention_patterns,
    difference_of_means,
    features,
    fit_probe,
    logit_difference,
    patch_heads,
    patch_positions,
    probe_scores,
    rows_at,
    steer_feature,
)
from insitu.recipes.sentiment import reviews
from tests import models

pytestmark = pytest.mark.in_process
CLEAN, CORRUPTED = "the cat sat on the mat", "the dog sat on the mat"
Edit = Callable[[torch.Tensor], Any]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[3] - logits[7]


def by_hooks(ids: list[int], path: str, edit: Edit) -> float:
    """The metric in transformers with a module's output edited in place."""
    oracle = models.oracle(models.tiny("llama"))

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        edited = value.clone()
        edit(edited[0])
        return (edited, *output[1:]) if isinstance(output, tuple) else edited

    handle = oracle.get_submodule(path).register_forward_hook(hook)
    try:
        with torch.no_grad():
            return metric(oracle(torch.tensor([ids])).logits[0, -1]).item()
    finally:
        handle.remove()


def ids_of(text: str) -> list[int]:
    return models.encode(models.tiny("llama"), text)


def stream(text: str, layer: int) -> torch.Tensor:
    return models.hf_residuals(models.oracle(models.tiny("llama")), ids_of(text)).resid_post[layer]


# -- patching ---------------------------------------------------------------------------------


def same_length() -> tuple[list[int], list[int]]:
    clean, corrupted = ids_of(CLEAN), ids_of(CORRUPTED)
    size = min(len(clean), len(corrupted))
    return clean[-size:], corrupted[-size:]


def test_patching_by_positions_is_that_of_hooks(model: Any) -> None:
    clean, corrupted = same_length()
    found = patch_positions(model, clean, corrupted, metric, layers=[0, 2])
    oracle = models.oracle(models.tiny("llama"))
    kept = models.hf_residuals(oracle, clean).resid_post

    def patched(layer: int, position: int) -> float:
        def edit(rows: torch.Tensor) -> None:
            rows[position] = kept[layer][position]

        return by_hooks(corrupted, f"model.layers.{layer}", edit)

    for row, layer in enumerate([0, 2]):
        for position in range(len(clean)):
            effect = (patched(layer, position) - found.corrupted) / (found.clean - found.corrupted)
            assert found.effect[row][position] == pytest.approx(effect, abs=2e-4)
    assert found.noise < 1e-4
    assert len(found.columns) == len(clean)


def test_all_heads_of_a_layer_together_are_its_attention(model: Any) -> None:
    clean, corrupted = same_length()
    found = patch_heads(model, clean, corrupted, metric, layers=[1])
    assert found.columns == ["0", "1", "2", "3"]
    oracle = models.oracle(models.tiny("llama"))
    kept = models.hf_activations(oracle, clean)["model.layers.1.self_attn.o_proj"].input

    for head in range(4):
        part = slice(head * 32, (head + 1) * 32)

        def before(module: Any, inputs: Any, part: slice = part) -> Any:
            edited = inputs[0].clone()
            edited[0, :, part] = kept[:, part]
            return (edited,)

        handle = oracle.get_submodule("model.layers.1.self_attn.o_proj").register_forward_pre_hook(before)
        with torch.no_grad():
            patched = metric(oracle(torch.tensor([corrupted])).logits[0, -1]).item()
        handle.remove()
        effect = (patched - found.corrupted) / (found.clean - found.corrupted)
        assert found.effect[0][head] == pytest.approx(effect, abs=2e-4)


@pytest.mark.parametrize(
    ("clean", "corrupted", "text"),
    [([1, 2, 3], [1, 2], "3 and 2 tokens"), ([1, 2, 3], [1, 2, 3], "nothing to bring back")],
)
def test_patching_refuses(model: Any, clean: Any, corrupted: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        patch_positions(model, clean, corrupted, metric)


def test_a_metric_of_words_that_are_several_tokens_is_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match="tokens"):
        logit_difference(model, "the cat sat on", "mat")


# -- ablation ---------------------------------------------------------------------------------


def test_ablation_by_zeros_and_means_is_that_of_hooks(model: Any) -> None:
    prompts = [ids_of(CLEAN), ids_of("on the mat")]
    zero = ablate(model, prompts, metric, at=["mlp_out[2]", "mlp_out[0]"])
    assert zero.places == ["mlp_out[0]", "mlp_out[2]"]
    for row, layer in enumerate([0, 2]):
        wanted = [by_hooks(ids, f"model.layers.{layer}.mlp", torch.Tensor.zero_) for ids in prompts]
        assert zero.scores[row] == pytest.approx(wanted, abs=1e-3)
    oracle = models.oracle(models.tiny("llama"))
    rows = torch.cat([models.hf_residuals(oracle, ids).mlp_out[2] for ids in prompts])

    def to_mean(value: torch.Tensor) -> None:
        value[:] = rows.mean(0)

    mean = ablate(model, prompts, metric, at="mlp_out[2]", how="mean")
    assert mean.scores[0] == pytest.approx([by_hooks(ids, "model.layers.2.mlp", to_mean) for ids in prompts], abs=1e-3)
    untouched = [by_hooks(ids, "model.layers.2.mlp", lambda rows: None) for ids in prompts]
    assert mean.baseline == pytest.approx(untouched, abs=1e-3)
    assert mean.drop["mlp_out[2]"] == pytest.approx(sum(untouched) / 2 - sum(mean.scores[0]) / 2, abs=1e-3)


def test_resampling_draws_rows_of_the_reference(model: Any) -> None:
    one = ids_of("mat")[:1]
    found = ablate(model, [ids_of(CLEAN)], metric, at="mlp_out[1]", how="resample", reference=[one])
    row = models.hf_residuals(models.oracle(models.tiny("llama")), one).mlp_out[1][0]

    def edit(rows: torch.Tensor) -> None:
        rows[:] = row

    assert found.scores[0][0] == pytest.approx(by_hooks(ids_of(CLEAN), "model.layers.1.mlp", edit), abs=1e-3)
    again = ablate(model, [ids_of(CLEAN)], metric, at="mlp_out[1]", how="resample", seed=3)
    assert again.scores == ablate(model, [ids_of(CLEAN)], metric, at="mlp_out[1]", how="resample", seed=3).scores


# -- steering ---------------------------------------------------------------------------------


def test_a_difference_of_means(model: Any) -> None:
    found = difference_of_means(model, [CLEAN, "the mat"], [CORRUPTED], at="resid_post[1]")
    wanted = torch.stack([stream(CLEAN, 1)[-1], stream("the mat", 1)[-1]]).mean(0) - stream(CORRUPTED, 1)[-1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "edit"),
    [
        ({"scale": 2.0}, lambda rows, v: rows.add_(2 * v)),
        ({"norm_matched": True}, lambda rows, v: rows.add_(rows.norm(dim=-1, keepdim=True) * v / v.norm())),
        ({"how": "project_out"}, lambda rows, v: rows.sub_((rows @ v / v.norm())[:, None] * v / v.norm())),
        ({"how": "set"}, lambda rows, v: rows.copy_(v.expand_as(rows))),
        ({"positions": slice(-1, None)}, lambda rows, v: rows[-1:].add_(v)),
    ],
)
@pytest.mark.parametrize("phase", ["all", "prompt"])
def test_steering_is_that_of_hooks(model: Any, settings: dict[str, Any], edit: Any, phase: Any) -> None:
    vector = torch.randn(128, generator=torch.Generator().manual_seed(0))
    steering = Steering(model, vector, "resid_post[1]", phase=phase, **settings)

    def block(tracer: Any) -> float:
        steering(tracer)
        return float("nan")

    with model.trace(CLEAN, temperature=0.0, max_tokens=1):
        if phase == "prompt":
            steering(None)
            found = metric(model.logits[0]).save()
        else:
            steering.edit(model.resid_post[1][steering.positions])
            found = metric(model.logits[0]).save()
    wanted = by_hooks(ids_of(CLEAN), "model.layers.1", lambda rows: edit(rows, vector))
    assert float(found) == pytest.approx(wanted, abs=2e-3)
    assert model.run(block, CLEAN, max_tokens=2) != 0


@pytest.mark.parametrize("phase", ["all", "prompt", "generated"])
def test_the_steps_that_are_steered(model: Any, phase: Any) -> None:
    vector = torch.full((128,), 1e3)
    steering = Steering(model, vector, "resid_post[1]", how="set", phase=phase)

    def watched(tracer: Any) -> list[bool]:
        seen = []
        for _ in tracer.iter[:]:
            seen.append(bool((model.resid_post[1] == 1e3).all()))
        return seen

    def both(tracer: Any) -> list[bool]:
        return watched(tracer)

    with model.edit() as (tracer, edit):
        steering(tracer)
    try:
        seen = model.run(both, CLEAN, temperature=0.0, max_tokens=3, ignore_eos=True)
    finally:
        edit.clear()
    assert seen == {"all": [True] * 3, "prompt": [True, False, False], "generated": [False, True, True]}[phase]


@pytest.mark.parametrize("settings", [{"how": "ad"}, {"phase": "decode"}, {"at": "resid_post"}])
def test_steering_refuses(model: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"'project_out'|4 places"):
        Steering(model, torch.zeros(128), **{"at": "resid_post[1]", **settings}).generate([CLEAN], max_tokens=1)


# -- attention, autoencoders ------------------------------------------------------------------


def test_attention_patterns_by_layer(model: Any) -> None:
    found = attention_patterns(model, CLEAN, layers=[2, 0])
    oracle = models.oracle(models.tiny("llama"))
    oracle.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids_of(CLEAN)]), output_attentions=True).attentions
    for layer in (0, 2):
        torch.testing.assert_close(found.patterns[layer], wanted[layer][0], rtol=0, atol=1e-5)
    assert len(found.tokens) == len(ids_of(CLEAN))


@pytest.fixture
def sae(tmp_path: Path) -> SparseAutoencoder:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "W_enc": torch.randn(128, 40, generator=generator),
        "b_enc": torch.randn(40, generator=generator),
        "W_dec": torch.randn(40, 128, generator=generator),
        "b_dec": torch.randn(128, generator=generator),
        "threshold": torch.rand(40, generator=generator),
    }
    save_file(tensors, str(tmp_path / "sae.safetensors"))
    return SparseAutoencoder.load(tmp_path / "sae.safetensors")


def test_features_of_an_autoencoder(model: Any, sae: SparseAutoencoder) -> None:
    rows = stream(CLEAN, 1)
    before = (rows - sae.b_dec) @ sae.w_enc + sae.b_enc
    assert sae.threshold is not None
    wanted = torch.where(before > sae.threshold, before.relu(), 0)
    torch.testing.assert_close(features(model, CLEAN, sae, at="resid_post[1]"), wanted, rtol=0, atol=1e-3)
    chosen = [int(wanted[-1].argmax())]
    gone = sae.without(rows, chosen)
    torch.testing.assert_close(gone, rows - wanted[:, chosen] @ sae.w_dec[chosen])
    torch.testing.assert_close(sae.decode(wanted), wanted @ sae.w_dec + sae.b_dec)


def test_an_autoencoder_steers_and_ablates(model: Any, sae: SparseAutoencoder) -> None:
    settings = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    plain = model.run(lambda tracer: tracer.result.outputs[0].text, [CLEAN], **settings)
    assert ablate_features(model, [CLEAN], sae, [], at="resid_post[1]", **settings) == plain
    assert steer_feature(model, [CLEAN], sae, 3, 0.0, at="resid_post[1]", **settings) == plain
    assert steer_feature(model, [CLEAN], sae, 3, 50.0, at="resid_post[1]", **settings) != plain


def test_a_file_that_is_no_autoencoder_is_refused(tmp_path: Path) -> None:
    save_file({"W_enc": torch.zeros(4, 8), "b_enc": torch.zeros(8)}, str(tmp_path / "a.safetensors"))
    with pytest.raises(ArgumentError, match="has no W_dec"):
        SparseAutoencoder.load(tmp_path / "a.safetensors")
    wrong = {"W_enc": (4, 8), "b_enc": (8,), "W_dec": (4, 8), "b_dec": (4,)}
    save_file({name: torch.zeros(shape) for name, shape in wrong.items()}, str(tmp_path / "b.safetensors"))
    with pytest.raises(ArgumentError, match=r"W_dec is \(4, 8\), and W_enc wants \(8, 4\)"):
        SparseAutoencoder.load(tmp_path / "b.safetensors")


# -- on a trained model -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_country_decides_until_late(smol: Any, tmp_path: Path) -> None:
    paris = logit_difference(smol, " Paris", " Tokyo")
    found = patch_positions(
        smol, "The capital of France is", "The capital of Japan is", paris, layers=[0, 12, 29], positions=[2, 3, 4]
    )
    assert found.clean > 5
    assert found.corrupted < -5
    early, middle, late = found.effect
    assert early[1] > 0.9
    assert middle[1] > 0.9
    assert late[2] > 0.9
    assert max(map(abs, [early[0], late[0], early[2], late[1]])) < 0.1
    found.save_png(tmp_path / "patching.png")
    assert (tmp_path / "patching.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_probe_tells_good_reviews_from_bad_ones(smol: Any, tmp_path: Path) -> None:
    data, at = reviews(), "resid_post[16]"
    probe = fit_probe(rows_at(smol, data.train, at), data.train_labels, at, C=0.1)
    assert probe.accuracy(rows_at(smol, data.test, at), data.test_labels) >= 0.85
    live = probe_scores(smol, "The food was wonderful but the service was terrible and", probe, max_tokens=4)
    scores = dict(zip(live.tokens, live.scores, strict=True))
    assert scores[" wonderful"] > 0 > scores[" terrible"]
    live.save_png(tmp_path / "strip.png")
    assert (tmp_path / "strip.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_direction_turns_what_is_written(smol: Any) -> None:
    data, at = reviews(), "resid_post[12]"
    direction = difference_of_means(smol, data.of(1), data.of(0), at=at, position=slice(None))
    good = logit_difference(smol, " good", " bad")

    def scored(scale: float) -> float:
        def block(tracer: Any) -> float:
            Steering(smol, direction, at, scale=scale, norm_matched=True, phase="prompt")(tracer)
            return float(good(smol.logits[0]))

        return sum(smol.run(block, ["The film was very", "All in all it is"], temperature=0.0, max_tokens=1))

    assert scored(-0.3) < scored(0.0) < scored(0.3)


def test_labels_of_one_kind_are_refused() -> None:
    with pytest.raises(ArgumentError, match="both occur"):
        fit_probe(torch.zeros(3, 2), [1, 1, 1], "resid_post[0]")


def test_no_review_is_in_both_parts() -> None:
    data = reviews()
    assert not set(data.train) & set(data.test)
    assert (len(data.train), len(data.test), sum(data.test_labels)) == (48, 16, 8)


def test_one_prompt_is_not_taken_for_its_letters(model: Any) -> None:
    vector, greedy = torch.ones(models.WIDTH), {"temperature": 0.0, "max_tokens": 2}
    one = ablate(model, CLEAN, metric, at="mlp_out[1]", how="mean", reference=CORRUPTED)
    assert one.drop == ablate(model, [CLEAN], metric, at="mlp_out[1]", how="mean", reference=[CORRUPTED]).drop
    steering = Steering(model, vector, "resid_post[1]")
    assert steering.generate(CLEAN, **greedy) == steering.generate([CLEAN], **greedy)
    assert rows_at(model, CLEAN, "resid_post[1]").equal(rows_at(model, [CLEAN], "resid_post[1]"))
    assert rows_at(model, ids_of(CLEAN), "resid_post[1]").equal(rows_at(model, [CLEAN], "resid_post[1]"))
    both = difference_of_means(model, CLEAN, CORRUPTED, at="resid_post[1]")
    assert both.equal(difference_of_means(model, [CLEAN], [CORRUPTED], at="resid_post[1]"))
    with pytest.raises(ArgumentError, match="there are no prompts"):
        rows_at(model, [], "resid_post[1]")
