"""Keys of a server: who may do what, and how much."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from insitu.block import ArgumentError

__all__ = ["Key", "KeyLimits", "Keys", "Permission"]


class Permission(IntEnum):
    """What a key's requests may be; each includes those before it."""

    FORM = 1
    """The JSON form alone."""
    BLOCKS = 2
    """Blocks, checked and run under the allow-list."""
    TRUSTED = 3
    """Any code. Whoever has such a key can do to the server's machine what the server can."""

    @classmethod
    def of(cls, name: str) -> Permission:
        """By its name: form, blocks or trusted."""
        if name not in _NAMES:
            raise ArgumentError(f"permission {name!r}: it is {', '.join(_NAMES)}")
        return _NAMES[name]


_NAMES = {"form": Permission.FORM, "blocks": Permission.BLOCKS, "trusted": Permission.TRUSTED}


@dataclass(frozen=True)
class KeyLimits:
    """Limits on one key's requests; None is the server's own.

    ``operations``, ``seconds`` and ``saved_bytes`` are of one block, ``traces`` how many may be in flight at once.
    """

    operations: int | None = None
    seconds: float | None = None
    saved_bytes: int | None = None
    traces: int | None = None


@dataclass(frozen=True)
class Key:
    """One key. The key itself is not kept, but its SHA-256. ``edits``: whether it may install blocks that run for
    every request."""

    name: str
    digest: bytes = field(repr=False)
    permission: Permission = Permission.BLOCKS
    edits: bool = False
    limits: KeyLimits = field(default_factory=KeyLimits)


class Keys:
    """The keys of a server."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)
        names = [key.name for key in self._keys]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"two keys have the name {name!r}")
        for key, other in itertools.combinations(self._keys, 2):
            if key.digest == other.digest:
                raise ArgumentError(f"{key.name!r} and {other.name!r} are the same key")

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def find(self, given: str) -> Key | None:
        """The key that ``given`` is, or None. Takes the same time whichever it is, and if it is none."""
        digest = _digest(given)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    @classmethod
    def of_texts(cls, texts: Iterable[str], permission: Permission = Permission.BLOCKS) -> Keys:
        """Keys given as such, on the command line say, which all may do the same."""
        return cls(Key(f"key-{number}", _digest(_checked(text)), permission, True) for number, text in enumerate(texts))

    @classmethod
    def load(cls, file: str | Path) -> Keys:
        """The keys of a file of JSON: a list of objects, each with ``name`` and one of ``key`` and ``sha256``, and
        perhaps ``permission`` (``"form"``, ``"blocks"``, ``"trusted"``), ``edits`` and ``limits``.

        Raises ``ArgumentError``, naming the entry, for anything else.
        """
        try:
            data = json.loads(Path(file).read_text("utf-8"), object_pairs_hook=_once)
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the file of keys {file} can't be read: {error}") from None
        if not isinstance(data, list):
            raise ArgumentError(f"the file of keys {file} is a list of objects")
        return cls(_key(entry, f"key {number} of {file}") for number, entry in enumerate(data))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice in an object")
    return made


def _checked(text: str) -> str:
    if len(text) < 8:
        raise ArgumentError("a key has at least 8 characters")
    return text


def _key(entry: Any, what: str) -> Key:
    known = {"name", "key", "sha256", "permission", "edits", "limits"}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ArgumentError(f"{what} is an object with a name")
    if unknown := entry.keys() - known:
        raise ArgumentError(f"{what} has {sorted(unknown)[0]!r}, which is none of {', '.join(sorted(known))}")
    if ("key" in entry) == ("sha256" in entry):
        raise ArgumentError(f"{what} has either key or sha256")
    permission, edits = entry.get("permission", "blocks"), entry.get("edits", False)
    if not isinstance(permission, str) or not isinstance(edits, bool):
        raise ArgumentError(f"{what}: permission is a text, and edits true or false")
    return Key(entry["name"], _digest_of(entry, what), Permission.of(permission), edits, _limits(entry, what))


def _digest_of(entry: Mapping[str, Any], what: str) -> bytes:
    given = entry.get("key", entry.get("sha256"))
    if not isinstance(given, str):
        raise ArgumentError(f"{what}: key and sha256 are texts")
    if "key" in entry:
        return _digest(_checked(given))
    try:
        digest = bytes.fromhex(given)
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ArgumentError(f"{what}: sha256 is 64 hexadecimal digits")
    return digest


def _limits(entry: Mapping[str, Any], what: str) -> KeyLimits:
    given = entry.get("limits", {})
    known = [each.name for each in fields(KeyLimits)]
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{what}: limits is an object")
    for name, value in given.items():
        if name not in known:
            raise ArgumentError(f"{what} has the limit {name!r}, which is none of {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ArgumentError(f"{what}: the limit {name} is a number above 0")
    return KeyLimits(**given)
