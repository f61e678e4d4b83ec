"""Tiny random models for the tests, and what HuggingFace transformers computes with them (the oracle)."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from torch import nn

CACHE = Path(__file__).resolve().parent.parent / "build" / "tiny-models"
LAYERS, WIDTH, HEADS, KV_HEADS, CONTEXT = 4, 128, 4, 2, 512
NAMES = ("gpt2", "llama", "qwen3", "mixtral")

SENTENCES = [
    "The Eiffel Tower is in the city of Paris, and the Colosseum is in the city of Rome.",
    "The capital of Japan is the city of Tokyo. The capital of Italy is the city of Rome.",
    "Water boils at one hundred degrees; it freezes at zero.",
    "She opened the door, walked into the garden and listened to the birds for a while.",
    "def add(first, second): return first + second  # the sum of both",
    "Once upon a time there was a small model that lived inside a large machine.",
    "When Mary and John went to the store, John gave a drink to Mary.",
    "The quick brown fox jumps over the lazy dog, again and again, until it is tired.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(name: str) -> str:
    """The folder of a tiny model of architecture `name` (one of `NAMES`), always with the same weights."""
    return built(name, "", lambda **common: _config(name, **common), NAMES.index(name))


def built(name: str, settings: str, config: Callable[..., transformers.PretrainedConfig], seed: int) -> str:
    """The folder of a random model, made once for each `settings`; all its scales and biases are random too."""
    versions = Path(__file__).read_bytes() + transformers.__version__.encode()
    folder = CACHE / f"{name}-{hashlib.sha256(settings.encode() + versions).hexdigest()[:12]}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=CACHE)
        _build(scratch, config, seed)
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return str(folder)


def _build(folder: str, config: Callable[..., transformers.PretrainedConfig], seed: int) -> None:
    tokenizer = _tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {"vocab_size": len(tokenizer), "dtype": "float32", "initializer_range": 0.2, **ids}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**common)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms' scales and biases: a model of ones and zeros hides mistakes
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(name: str, **common: Any) -> transformers.PretrainedConfig:
    if name == "gpt2":
        return transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=CONTEXT, **common)
    common |= {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "max_position_embeddings": CONTEXT,
    }
    if name == "llama":
        return transformers.LlamaConfig(**common)
    if name == "qwen3":
        return transformers.Qwen3Config(tie_word_embeddings=True, **common)
    if name == "mixtral":
        return transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **common)
    raise ValueError(f"no tiny model {name!r}, only {', '.join(NAMES)}")


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


@functools.cache
def oracle(folder: str) -> nn.Module:
    """The transformers model of a folder, in float32, its attention written out in plain torch."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def encode(folder: str, text: str) -> list[int]:
    return tokenizer(folder).encode(text)


@torch.no_grad()
def greedy(folder: str, ids: Sequence[int], tokens: int) -> list[int]:
    """The `tokens` ids that transformers goes on with, end tokens not heeded."""
    model, ids = oracle(folder), list(ids)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-tokens:]


def greedy_text(folder: str, prompt: str, tokens: int) -> str:
    return tokenizer(folder).decode(greedy(folder, encode(folder, prompt), tokens))


@dataclass(frozen=True)
class Activation:
    """What one module was given and what it returned. Tensors have no batch axis: `[tokens, width]`."""

    input: Any
    output: Any


Hooks = dict[str, Callable[[Any], Any]]


@torch.no_grad()
def hf_activations(model: nn.Module, ids: Sequence[int], edits: Hooks | None = None) -> dict[str, Activation]:
    """One forward over `ids`: path of a module -> what went in (its first argument) and came out.

    `edits` maps a path to a function that is given the module's output and returns the output to go on
    with. The path `""` is the whole model: its output's `.logits` are those of every position.
    """
    seen: dict[str, Activation] = {}
    edits = edits or {}

    def record(path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if path in edits:
                output = edits[path](output)
            seen[path] = Activation(_own(first), _own(output))
            return output

        return hook

    hooks = [module.register_forward_hook(record(path), with_kwargs=True) for path, module in model.named_modules()]
    try:
        model(torch.tensor([list(ids)]))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _own(value: Any) -> Any:
    """A copy of a value without its batch axis."""
    if isinstance(value, torch.Tensor):
        return (value[0] if value.ndim and value.shape[0] == 1 else value).clone()
    if isinstance(value, tuple | list):
        return type(value)(_own(item) for item in value)
    if isinstance(value, transformers.utils.ModelOutput):
        return {key: _own(item) for key, item in value.items()}
    return value


@dataclass
class Residuals:
    """The residual stream by TransformerLens's names, each `[tokens, width]`; `logits` for every position."""

    embed: torch.Tensor
    final_norm: torch.Tensor
    logits: torch.Tensor
    resid_pre: list[torch.Tensor] = field(default_factory=list)
    resid_mid: list[torch.Tensor] = field(default_factory=list)
    resid_post: list[torch.Tensor] = field(default_factory=list)
    attn_out: list[torch.Tensor] = field(default_factory=list)
    mlp_out: list[torch.Tensor] = field(default_factory=list)


def hf_residuals(model: nn.Module, ids: Sequence[int]) -> Residuals:
    seen = hf_activations(model, ids)
    gpt2 = "transformer.h.0" in seen
    trunk, layers = ("transformer", "transformer.h") if gpt2 else ("model", "model.layers")
    attention, second_norm = ("attn", "ln_2") if gpt2 else ("self_attn", "post_attention_layernorm")
    found = Residuals(
        embed=seen[f"{trunk}.{'wte' if gpt2 else 'embed_tokens'}"].output,
        final_norm=seen[f"{trunk}.{'ln_f' if gpt2 else 'norm'}"].output,
        logits=seen[""].output["logits"],
    )
    for index in range(model.config.num_hidden_layers):
        layer = f"{layers}.{index}"
        found.resid_pre.append(seen[layer].input)
        found.resid_mid.append(seen[f"{layer}.{second_norm}"].input)
        found.resid_post.append(_tensor(seen[layer].output))
        found.attn_out.append(_tensor(seen[f"{layer}.{attention}"].output))
        found.mlp_out.append(_tensor(seen[f"{layer}.mlp"].output))
    return found


def hf_hidden_states(model: nn.Module, ids: Sequence[int]) -> list[torch.Tensor]:
    """The stream before the first layer and after each, `[tokens, width]`, none of them normed."""
    found = hf_residuals(model, ids)
    return [found.resid_pre[0], *found.resid_post]


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
