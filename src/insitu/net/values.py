"""Values as JSON, their tensors apart. Nothing is pickled, and nothing that arrives makes code run.

Null, booleans, numbers, texts and lists are themselves. All else is an object with one key ``$``, its kind, and
its content. Containers are numbered as they come, so that one that is met again is the same one at the other side.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from insitu.block import ArgumentError
from insitu.net.outputs import plain_of
from insitu.net.refs import MODULES, Device, Dtype, FunctionRef, Member, ModuleRef, Named, Ref
from insitu.net.tensors import TensorWriter, is_array, is_tensor
from insitu.tree.cache import Cache

__all__ = ["Encoder"]

_DEPTH = 60
_INT_BITS = 8192


class Encoder:
    """Encodes the values of one message.

    ``name_of`` says what an object stands for on the other side, or None. ``function`` takes a function of the
    caller's and gives its number; without it, functions can't travel.
    """

    def __init__(
        self,
        name_of: Callable[[Any], Named | None] | None = None,
        function: Callable[[FunctionType, str], int] | None = None,
    ) -> None:
        self.tensors: TensorWriter = TensorWriter()
        self._name_of = name_of or (lambda _: None)
        self._function = function
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def encode(self, value: Any, what: str = "a value") -> Any:
        """The JSON of a value. Raises ``ArgumentError``, which speaks of ``what``, for one that can't travel."""
        return self._encode(value, what, 0)

    def _encode(self, value: Any, what: str, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if depth > _DEPTH:
            raise ArgumentError(f"{what} is nested more than {_DEPTH} deep, and can't travel: keep it flatter")
        kind = type(value)
        if kind in (int, float, str):
            return _scalar(value, what)
        if kind in (list, dict, set, frozenset):
            return self._container(value, what, depth)
        if kind is tuple or (kind.__module__ == "torch" and kind.__qualname__ == "Size"):
            return {"$": "tuple", "v": self._all(value, what, depth)}
        if (output := plain_of(value)) is not None:
            return {"$": output[0], **self._fields(output[1], what, depth)}
        if isinstance(value, tuple) and (fields := _fields_of(value)) is not None:
            name = getattr(value, "_name", None) or kind.__qualname__
            return {"$": "record", "n": name, "f": list(fields), "v": self._all(value, what, depth)}
        if is_tensor(value):
            return {"$": "tensor", "i": self.tensors.add(value, what)}
        if is_array(value):
            return {"$": "array", "i": self.tensors.add(value, what)}
        if (made := _small(value)) is not None:
            return made
        if (ref := self._ref(value, what)) is not None:
            return _encoded_ref(ref)
        return self._other(value, what, depth)

    def _other(self, value: Any, what: str, depth: int) -> Any:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
            return self._encode(value.item(), what, depth + 1)
        if isinstance(value, Cache):
            return {"$": "cache", "v": self._encode(value.as_data(), what, depth + 1)}
        plains: tuple[Any, ...] = (bool, int, float, str, bytes)
        for plain in plains:
            if isinstance(value, plain):  # an enum, say, or a class of the user's
                return self._encode(plain(value), what, depth + 1)
        raise refusal(value, what)

    def _container(self, value: Any, what: str, depth: int) -> Any:
        number = self._numbers.get(id(value))
        if number is not None:
            return {"$": "same", "i": number}
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if type(value) is list:
            return self._all(value, what, depth)
        if type(value) is dict:
            pairs = [
                [self._encode(key, f"a key of {what}", depth + 1), self._encode(part, what, depth + 1)]
                for key, part in value.items()
            ]
            return {"$": "dict", "v": pairs}
        return {"$": type(value).__name__, "v": self._all(value, what, depth)}

    def _all(self, parts: Any, what: str, depth: int) -> list[Any]:
        return [self._encode(part, what, depth + 1) for part in parts]

    def _fields(self, fields: dict[str, Any], what: str, depth: int) -> dict[str, Any]:
        given = {name: value for name, value in fields.items() if value is not None}
        return {name: self._encode(value, what, depth + 1) for name, value in given.items()}

    def _ref(self, value: Any, what: str) -> Ref | None:
        if (named := self._name_of(value)) is not None:
            return named
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if torch is not None and isinstance(value, torch.device):
            return Device(str(value))
        if isinstance(value, ModuleType):
            return ModuleRef(value.__name__) if value.__name__ in MODULES else None
        if (member := _member(value)) is not None:
            return member
        if isinstance(value, FunctionType) and self._function is not None:
            return FunctionRef(self._function(value, what))
        return None


def refusal(value: Any, what: str) -> ArgumentError:
    """Why a value can't travel, and the way out."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, ModuleType):
        way = f"blocks that travel know the modules {', '.join(MODULES)}; do what needs `{value.__name__}` outside"
    elif isinstance(value, type):
        way = "classes stay here: use functions, and values that are dicts or tuples"
    elif callable(value) and not isinstance(value, FunctionType):
        way = "of what can be called, functions of your own travel, as source: write one that does it"
    elif isinstance(value, FunctionType):
        way = "functions don't come back: return what they compute"
    else:
        way = (
            "numbers, texts, lists, dicts, tuples, sets, slices, arrays and tensors travel: take what you need from it"
        )
    return ArgumentError(
        f"{what} is {'a module' if isinstance(value, ModuleType) else name}, which can't travel; {way}"
    )


def _scalar(value: Any, what: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "float", "v": str(value)}
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        raise ArgumentError(
            f"{what} is an int of {value.bit_length()} bits, and can't travel: {_INT_BITS} are the most"
        )
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                f"{what} is a text with lone surrogates, which can't travel: encode it to bytes"
            ) from None
    return value


def _small(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$": "complex", "v": [str(value.real), str(value.imag)]}
    if isinstance(value, (slice, range)):
        parts = [value.start, value.stop, value.step]
        if all(part is None or isinstance(part, int) for part in parts):
            return {"$": type(value).__name__, "v": parts}
    return {"$": "ellipsis"} if value is Ellipsis else None


def _fields_of(value: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The names of a named tuple's items, torch's kind included."""
    fields = getattr(value, "_fields", None)
    if isinstance(fields, tuple) and len(fields) == len(value):
        return fields
    if type(value).__module__ == "torch.return_types":
        return tuple(name for name in type(value).__match_args__)  # type: ignore[attr-defined]
    return None


def _member(value: Any) -> Member | None:
    name = getattr(value, "__name__", None)
    if not callable(value) or not isinstance(name, str) or name.startswith("_"):
        return None
    for module in MODULES:
        found = sys.modules.get(module)
        if found is not None and vars(found).get(name) is value:
            return Member(module, name)
    return None


def _encoded_ref(ref: Ref) -> dict[str, Any]:
    match ref:
        case ModuleRef(name):
            return {"$": "module", "v": name}
        case Member(module, name):
            return {"$": "member", "v": [module, name]}
        case Dtype(name):
            return {"$": "dtype", "v": name}
        case Device(name):
            return {"$": "device", "v": name}
        case FunctionRef(number):
            return {"$": "function", "i": number}
        case Named(kind, path):
            return {"$": "named", "v": [kind, path]}
