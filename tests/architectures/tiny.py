"""Tiny random models of the architectures, with the tokenizer of the other tiny models."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests import models
from tests.architectures.configs import ARCHITECTURES


def tiny(name: str) -> str:
    """The folder of the tiny model of an architecture, always with the same weights."""
    digest = hashlib.sha256(repr(ARCHITECTURES[name]).encode() + Path(models.__file__).read_bytes())
    folder = models.CACHE / f"{name}-{digest.hexdigest()[:12]}-{transformers.__version__}"
    if not folder.exists():
        models.CACHE.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=models.CACHE)
        _build(name, scratch)
        try:
            os.replace(scratch, folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return str(folder)


def _build(name: str, folder: str) -> None:
    architecture = ARCHITECTURES[name]
    tokenizer = models._tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {"vocab_size": len(tokenizer), "dtype": "float32", "initializer_range": 0.2, **ids}
    config = getattr(transformers, architecture.config)(**{**common, **architecture.settings})
    with torch.random.fork_rng():
        torch.manual_seed(list(ARCHITECTURES).index(name))
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms' scales and biases: a model of ones and zeros hides mistakes
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_class(name: str) -> str:
    """The model class that the config asks for."""
    return json.loads((Path(tiny(name)) / "config.json").read_text())["architectures"][0]
