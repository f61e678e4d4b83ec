"""The oracle is consistent with itself, so that a difference found with it is insitu's."""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.models import LAYERS, WIDTH

PROMPT = "The capital of Japan is"


@pytest.mark.parametrize("name", models.NAMES)
def test_the_residual_stream_adds_up(name: str) -> None:
    model = models.oracle(models.tiny(name))
    ids = models.encode(models.tiny(name), PROMPT)
    found = models.hf_residuals(model, ids)
    assert found.embed.shape == (len(ids), WIDTH)
    assert len(found.resid_post) == LAYERS
    for layer in range(LAYERS):
        mid = found.resid_pre[layer] + found.attn_out[layer]
        torch.testing.assert_close(found.resid_mid[layer], mid)
        torch.testing.assert_close(found.resid_post[layer], mid + found.mlp_out[layer])
    torch.testing.assert_close(model.get_output_embeddings()(found.final_norm), found.logits)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])).logits[0], found.logits)


@pytest.mark.parametrize("name", models.NAMES)
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    model = models.oracle(models.tiny(name))
    ids = models.encode(models.tiny(name), PROMPT)
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    ours = models.hf_hidden_states(model, ids)
    assert len(ours) == len(theirs)
    for mine, reference in zip(ours[:-1], theirs[:-1], strict=True):  # their last one is normed
        torch.testing.assert_close(mine, reference[0])


def test_an_edit_is_seen_by_what_follows() -> None:
    folder = models.tiny("llama")
    model, ids = models.oracle(folder), models.encode(folder, PROMPT)
    plain = models.hf_activations(model, ids)
    edited = models.hf_activations(model, ids, edits={"model.layers.1.mlp": torch.zeros_like})
    assert torch.equal(edited["model.layers.1"].input, plain["model.layers.1"].input)
    assert edited["model.layers.1.mlp"].output.abs().max() == 0
    assert not torch.allclose(edited["model.layers.2"].input, plain["model.layers.2"].input)
    again = models.hf_activations(model, ids)
    assert torch.equal(again[""].output["logits"], plain[""].output["logits"])


def test_the_tokenizer_round_trips_and_chats() -> None:
    tokenizer = models.tokenizer(models.tiny("gpt2"))
    assert tokenizer.decode(tokenizer.encode("Zürich, 東京\n")) == "Zürich, 東京\n"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_weights_are_the_same_every_time(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = models.oracle(models.tiny("llama")).state_dict()
    monkeypatch.setattr(models, "CACHE", tmp_path)
    second = models.oracle(models.tiny("llama")).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
