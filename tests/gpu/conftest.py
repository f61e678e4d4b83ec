"""A small random Llama in bfloat16 that GPU tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        initializer_range=0.06,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
    path = str(tmp_path_factory.mktemp("llama"))
    model.to(torch.bfloat16).save_pretrained(path)
    return path
