"""Runs text under the guard, with no engine."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from insitu.block import Saves
from insitu.guard import GuardedBlock, GuardLimits
from insitu.guard.allowed import namespace
from insitu.net import CodeSource

VALUES = {"torch": namespace("torch"), "math": namespace("math"), "insitu": namespace("insitu")}


def source(text: str) -> CodeSource:
    return CodeSource("block.py", 1, "f", "f", textwrap.indent(textwrap.dedent(text).strip("\n"), "    "))


def run(text: str, limits: GuardLimits | None = None, **values: Any) -> dict[str, Any]:
    """The names that a block has at its end."""
    block, saves = GuardedBlock(source(text), limits), Saves()
    with torch.no_grad():
        found = block.run({**VALUES, **values}, saves, "__main__")
    return {name: found[name] for name in block.binds if name in found}
