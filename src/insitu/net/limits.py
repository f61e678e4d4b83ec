"""How much a receiver takes, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WireLimits"]

_MIB = 1 << 20


@dataclass(frozen=True)
class WireLimits:
    """Limits on one message. Sizes are in bytes.

    ``header``: its JSON. ``tensors``: its part of tensors. ``count``: how many of them. ``items``: values in it
    altogether, and ``depth``: how deep they are nested. ``composite_keys``: tuples among the keys of dictionaries
    and the members of sets, whose hashes a sender can choose.
    """

    header: int = 4 * _MIB
    tensors: int = 256 * _MIB
    count: int = 10_000
    items: int = 500_000
    depth: int = 64
    composite_keys: int = 2_000
    tensor_dims: int = 16
