"""Keyword arguments: refusing one that nobody knows, and one set over another."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from insitu.block import ArgumentError


def require_known(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises ``ArgumentError``, naming the nearest known one, for a name that is not known."""
    for name in given:
        if name not in known:
            raise ArgumentError(f"`{name}` is not {what}{nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the known name that is most like ``name``, if any is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


def merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with ``own`` over them; ``max_tokens`` and ``max_new_tokens`` are one setting."""
    same = {"max_tokens", "max_new_tokens"}
    kept = {name: value for name, value in settings.items() if not (name in same and same & own.keys())}
    return {**kept, **own}
