"""Functions that are named by the file they are in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insitu.block import ArgumentError


def function_in(given: str, what: str) -> Callable[..., Any]:
    """``"FILE.py:NAME"``. ``what``: the argument that names it. Raises ``ArgumentError`` if there is none."""
    path, _, name = given.rpartition(":")
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if path.endswith(".py") else None
    if spec is None or spec.loader is None or not file.exists():
        raise ArgumentError(f"{what}={given!r}: there is no such file; give FILE.py:NAME, a function there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise ArgumentError(f"{what}: {file} has no function `{name}`")
    return found  # type: ignore[no-any-return]
