"""JSON back into values. Whatever arrives, it ends in a value or in ``WireError``."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from insitu.net.errors import WireError
from insitu.net.limits import WireLimits
from insitu.net.outputs import PLAIN
from insitu.net.refs import MODULES, Device, Dtype, FunctionRef, Member, ModuleRef, Named, Record, Ref
from insitu.net.tensors import Library, TensorReader
from insitu.tree.cache import Cache

__all__ = ["Decoder"]

_FLOATS = ("inf", "-inf", "nan")
_NAME = 200
_INT_BITS = 8192


class Decoder:
    """Decodes the values of one message, in the order in which they were encoded.

    ``resolve`` turns what stands for something (``refs``) into that; without it, a value with one in it is refused.
    ``arrays``: what an array of numpy's becomes; itself, if left out.
    """

    def __init__(
        self,
        tensors: TensorReader | None = None,
        limits: WireLimits | None = None,
        resolve: Callable[[Ref], Any] | None = None,
        arrays: Library = "numpy",
    ) -> None:
        self._tensors = tensors or TensorReader(b"")
        self._limits = limits or WireLimits()
        self._resolve = resolve
        self._arrays: Library = arrays
        self._containers: list[Any] = []
        self._items = 0
        self._composite = 0

    def decode(self, data: Any) -> Any:
        """The value of its JSON. Raises ``WireError``."""
        return self._decode(data, 0)

    def names(self, data: Any) -> dict[str, Any]:
        """Values by name."""
        if not isinstance(data, dict):
            raise WireError("values come as an object of names")
        for name in data:
            if len(name) > _NAME or not name.isidentifier():
                raise WireError(f"{name!r:.40} is no name")
        return {name: self.decode(value) for name, value in data.items()}

    def _decode(self, data: Any, depth: int) -> Any:
        self._items += 1
        if self._items > self._limits.items:
            raise WireError(f"more than {self._limits.items} values in one message", "too-large")
        if depth > self._limits.depth:
            raise WireError(f"values are nested more than {self._limits.depth} deep", "too-deep")
        if data is None or isinstance(data, (bool, int, float, str)):
            if type(data) is int and data.bit_length() > _INT_BITS:
                raise WireError(f"an int of more than {_INT_BITS} bits", "too-large")
            return _text(data) if isinstance(data, str) else data
        if isinstance(data, list):
            made: list[Any] = []
            self._containers.append(made)
            made.extend(self._decode(part, depth + 1) for part in data)
            return made
        kind = data.get("$") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            raise WireError("an object without `$` is no value")
        if kind in PLAIN:
            return self._plain(PLAIN[kind], data, depth)
        handler = _KINDS.get(kind)
        if handler is None:
            raise WireError(f"values of the kind {kind!r:.40} are not known", "unknown")
        return handler(self, data, depth)

    # -- containers -----------------------------------------------------------------------

    def _parts(self, data: dict[str, Any], depth: int) -> list[Any]:
        return [self._decode(part, depth + 1) for part in _list(data)]

    def _tuple(self, data: dict[str, Any], depth: int) -> Any:
        return tuple(self._parts(data, depth))

    def _record(self, data: dict[str, Any], depth: int) -> Any:
        name, names = data.get("n"), data.get("f")
        parts = self._parts({"v": data.get("v")}, depth)
        if not _is_name(name) or not isinstance(names, list) or len(names) != len(parts):
            raise WireError("a record has a name, and one for each of its items")
        if not all(map(_is_name, names)) or len(set(names)) != len(names):
            raise WireError("the items of a record have different names")
        return Record(str(name), tuple(names), parts)

    def _dict(self, data: dict[str, Any], depth: int) -> Any:
        made: dict[Any, Any] = {}
        self._containers.append(made)
        for pair in _list(data):
            if not isinstance(pair, list) or len(pair) != 2:
                raise WireError("a dict is a list of pairs")
            key = self._key(pair[0], depth)
            made[key] = self._decode(pair[1], depth + 1)
        return made

    def _set(self, data: dict[str, Any], depth: int) -> Any:
        made: set[Any] = set()
        self._containers.append(made)
        made.update(self._key(part, depth) for part in _list(data))
        return made

    def _frozenset(self, data: dict[str, Any], depth: int) -> Any:
        place = len(self._containers)
        self._containers.append(None)
        made = self._containers[place] = frozenset(self._key(part, depth) for part in _list(data))
        return made

    def _key(self, data: Any, depth: int) -> Any:
        key = self._decode(data, depth + 1)
        if not isinstance(key, (str, bytes, int, float, type(None))):
            self._composite += 1
            if self._composite > self._limits.composite_keys:
                raise WireError(
                    f"more than {self._limits.composite_keys} keys that are tuples or of other composite kinds",
                    "too-large",
                )
        elif isinstance(key, int) and key.bit_length() > 64:
            raise WireError("a key is an int of more than 64 bits", "too-large")
        try:
            hash(key)
        except (TypeError, RecursionError):
            raise WireError("a key can't be hashed") from None
        return key

    def _same(self, data: dict[str, Any], depth: int) -> Any:
        number = data.get("i")
        if type(number) is not int or not 0 <= number < len(self._containers) or self._containers[number] is None:
            raise WireError("a container is named that has not come")
        return self._containers[number]

    def _plain(self, kind: type, data: dict[str, Any], depth: int) -> Any:
        known = {each.name for each in fields(kind)}
        given = {name: value for name, value in data.items() if name != "$"}
        if not given.keys() <= known:
            raise WireError(f"{kind.__name__} has no field {sorted(given.keys() - known)[0]!r:.40}", "unknown")
        try:
            made = kind(**{name: self._decode(value, depth + 1) for name, value in given.items()})
        except TypeError:
            raise WireError(f"a field of {kind.__name__} is missing") from None
        if not all(isinstance(getattr(made, name, None), (list, type(None))) for name in ("token_ids", "outputs")):
            raise WireError(f"token_ids and outputs of a {kind.__name__} are lists")
        return made

    def _cache(self, data: dict[str, Any], depth: int) -> Any:
        try:
            return Cache.from_data(self._decode(data.get("v"), depth + 1))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise error if isinstance(error, WireError) else WireError("this is no cache") from None

    # -- the rest -------------------------------------------------------------------------

    def _tensor(self, data: dict[str, Any], depth: int) -> Any:
        return self._tensors.get(data.get("i"))

    def _array(self, data: dict[str, Any], depth: int) -> Any:
        return self._tensors.get(data.get("i"), self._arrays)

    def _ref(self, data: dict[str, Any], depth: int) -> Any:
        if self._resolve is None:
            raise WireError("what stands for something of the other side can't be in this message")
        return self._resolve(_ref(data))


def _list(data: dict[str, Any]) -> list[Any]:
    parts = data.get("v")
    if not isinstance(parts, list):
        raise WireError("the parts of a container are a list")
    return parts


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise WireError("a text has lone surrogates") from None
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and len(value) <= _NAME and not value.startswith("_")


def _float(decoder: Decoder, data: dict[str, Any], depth: int) -> float:
    value = data.get("v")
    if value not in _FLOATS or not isinstance(value, str):
        raise WireError("a float of this kind is inf, -inf or nan")
    return float(value)


def _complex(decoder: Decoder, data: dict[str, Any], depth: int) -> complex:
    parts = _list(data)
    if len(parts) != 2 or not all(isinstance(part, str) and len(part) <= 40 for part in parts):
        raise WireError("a complex number is two texts")
    try:
        return complex(float(parts[0]), float(parts[1]))
    except ValueError:
        raise WireError("a complex number is two numbers") from None


def _bytes(decoder: Decoder, data: dict[str, Any], depth: int) -> bytes:
    try:
        return base64.b64decode(data.get("v", 0), validate=True)
    except (TypeError, ValueError):
        raise WireError("bytes come in base64") from None


def _span(make: type) -> Callable[[Decoder, dict[str, Any], int], Any]:
    def decode(decoder: Decoder, data: dict[str, Any], depth: int) -> Any:
        parts = _list(data)
        if len(parts) != 3 or not all(part is None or _is_index(part) for part in parts):
            raise WireError(f"a {make.__name__} is three ints")
        try:
            return make(*parts)
        except (TypeError, ValueError):
            raise WireError(f"this is no {make.__name__}") from None

    return decode


def _is_index(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 62


def _ellipsis(decoder: Decoder, data: dict[str, Any], depth: int) -> Any:
    return ...


def _ref(data: dict[str, Any]) -> Ref:
    kind, content = data["$"], data.get("v")
    if kind == "function":
        number = data.get("i")
        if type(number) is int and number >= 0:
            return FunctionRef(number)
    elif kind in ("member", "named"):
        if isinstance(content, list) and len(content) == 2 and all(isinstance(each, str) for each in content):
            first, second = (_text(each) for each in content)
            if kind == "named":
                return Named(first, second)
            if first in MODULES and _is_name(second):
                return Member(first, second)
    elif isinstance(content, str) and len(content) <= _NAME:
        if kind == "module" and content in MODULES:
            return ModuleRef(content)
        if kind in ("dtype", "device"):
            return Dtype(content) if kind == "dtype" else Device(content)
    raise WireError(f"a {kind} of this name is not known", "unknown")


_KINDS: dict[str, Callable[[Decoder, dict[str, Any], int], Any]] = {
    "tuple": Decoder._tuple,
    "record": Decoder._record,
    "dict": Decoder._dict,
    "set": Decoder._set,
    "frozenset": Decoder._frozenset,
    "same": Decoder._same,
    "cache": Decoder._cache,
    "tensor": Decoder._tensor,
    "array": Decoder._array,
    "float": _float,
    "complex": _complex,
    "bytes": _bytes,
    "slice": _span(slice),
    "range": _span(range),
    "ellipsis": _ellipsis,
    **dict.fromkeys(("module", "member", "dtype", "device", "function", "named"), Decoder._ref),
}
