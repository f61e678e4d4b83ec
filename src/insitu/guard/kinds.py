"""Classes by name, so that those of rooms above are known without importing them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

__all__ = ["is_of", "names_of"]


@functools.lru_cache(maxsize=1024)
def names_of(kind: type) -> tuple[str, ...]:
    """The full names of a class and of those that it derives from."""
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)


def is_of(value: Any, names: Iterable[str]) -> bool:
    """Whether its class is, or derives from, one of these names."""
    known = names_of(type(value))
    return any(name in known for name in names)
