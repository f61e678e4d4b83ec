"""How much a restricted block may use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from insitu.net.keys import KeyLimits

__all__ = ["GuardLimits"]

_MIB = 1 << 20


@dataclass(frozen=True)
class GuardLimits:
    """Limits on one run of one block. Sizes are in bytes.

    ``operations``: calls, attributes, items, operators and turns of loops. ``seconds``: of the block's own time, the
    forward's not counted; a single operation is not interrupted. ``value_bytes``: of one tensor, and ``live_bytes`` of
    all that the block holds. ``saved_bytes``: of what it saves. ``text``: characters of a text, ``items`` of a
    container, ``int_bits`` of an int. ``python_bytes``: of all texts and containers that it has ever made. ``work``:
    multiplications of one matrix product. ``rows``: of what a module of the model is called with.
    """

    operations: int = 1_000_000
    seconds: float = 30.0
    value_bytes: int = 256 * _MIB
    live_bytes: int = 1024 * _MIB
    saved_bytes: int = 256 * _MIB
    text: int = 1_000_000
    items: int = 1_000_000
    int_bits: int = 8192
    python_bytes: int = 256 * _MIB
    work: int = 1 << 40
    rows: int = 2048

    def of_key(self, key: KeyLimits) -> GuardLimits:
        """These, with what a key has limits of its own for."""
        own = {name: getattr(key, name) for name in ("operations", "seconds", "saved_bytes")}
        return replace(self, **{name: value for name, value in own.items() if value is not None})
