"""Tiny random models of the architectures, made as the other tiny models are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from tests import models
from tests.architectures.configs import ARCHITECTURES


def tiny(name: str) -> str:
    """The folder of the tiny model of an architecture, always with the same weights."""
    architecture = ARCHITECTURES[name]

    def config(**common: Any) -> transformers.PretrainedConfig:
        return getattr(transformers, architecture.config)(**{**common, **architecture.settings})

    return models.built(name, repr(architecture), config, list(ARCHITECTURES).index(name))


def model_class(name: str) -> str:
    """The model class that the config asks for."""
    return json.loads((Path(tiny(name)) / "config.json").read_text())["architectures"][0]
