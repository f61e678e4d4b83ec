"""Refusing a keyword argument that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from insitu.block import ArgumentError


def require_known(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises ``ArgumentError``, naming the nearest known one, for a name that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ArgumentError(f"`{name}` is not {what}{hint}")
