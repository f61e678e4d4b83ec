"""Comparing constants of code, where `1`, `1.0` and `True` are not the same."""

from __future__ import annotations

__all__ = ["same_constant"]


def same_constant(one: object, other: object) -> bool:
    """Whether two constants would be written alike. Order in a frozen set depends on how it was made."""
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return type(one) is type(other) and repr(one) == repr(other)
