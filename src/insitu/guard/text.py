"""Values as text: what a restricted block gets from ``str``, ``repr``, ``format`` and f-strings."""

from __future__ import annotations

import re
from typing import Any

import torch

from insitu.guard.errors import NotAllowedError
from insitu.guard.meter import Meter
from insitu.tree import LayerStream, Node
from insitu.tree.cache import Cache, Cached

__all__ = ["formatted", "make_plain", "text_of"]

_DEPTH = 30
_SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?(?P<width>\d{0,4})[,_]?(?:\.(?P<precision>\d{1,3}))?[bcdeEfFgGnosxX%]?")
_WIDEST = 1000
_PLAIN = (int, float, bool, type(None))
_CHAIN = 100
_BRACKETS = {list: "[]", tuple: "()", set: "{}", frozenset: "{}"}


def text_of(value: Any, meter: Meter, *, quoted: bool = True) -> str:
    """``repr(value)``, or with ``quoted=False`` ``str(value)``. Says no addresses."""
    if isinstance(value, str) and not quoted:
        return value
    made = _text(value, meter, 0, quoted)
    meter.text(len(made))
    return made


def formatted(value: Any, conversion: int, spec: str, meter: Meter) -> str:
    """What stands in an f-string for ``{value!conversion:spec}``."""
    if conversion != -1:
        value = text_of(value, meter, quoted=conversion != ord("s"))
        if conversion == ord("a"):
            value = value.encode("ascii", "backslashreplace").decode()
    if not spec:
        return text_of(value, meter, quoted=False)
    found = _SPEC.fullmatch(spec)
    if found is None or int(found["width"] or 0) > _WIDEST:
        raise NotAllowedError(f"the format {spec!r:.40} is not one that a restricted block may use")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if not isinstance(value, (str, int, float, complex)):
        raise TypeError(f"a {type(value).__name__} takes no format")
    made = format(value, spec)
    meter.text(len(made))
    return made


def make_plain(error: BaseException, meter: Meter) -> None:
    """Leaves an error no more than texts and numbers: whoever reports it writes out all that it was raised with."""
    seen = set[int]()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.args = tuple(
            part if type(part) in _PLAIN else text_of(part, meter, quoted=type(part) is not str) for part in each.args
        )
        if len(seen) == _CHAIN:
            each.__cause__ = each.__context__ = None
        pending += [each.__cause__, each.__context__]


def _text(value: Any, meter: Meter, depth: int, quoted: bool = True) -> str:
    meter.tick()
    kind = type(value)
    if isinstance(value, (str, bytes)):
        meter.text(4 * len(value))
        return repr(value)
    if value is None or value is ... or kind in (bool, int, float, complex, range, slice):
        return repr(value)
    if kind in (torch.Size, torch.dtype, torch.device) or isinstance(value, torch.Tensor):
        return repr(value)
    if isinstance(value, BaseException):
        if not quoted and len(value.args) == 1 and isinstance(value.args[0], str) and kind is not KeyError:
            return value.args[0]
        inner = ", ".join(_text(part, meter, depth + 1) for part in value.args[:10])
        return inner if not quoted else f"{kind.__name__}({inner})"
    if isinstance(value, (Node, LayerStream, Cache, Cached)):
        return repr(value)
    if kind is dict or kind in _BRACKETS or isinstance(value, tuple):
        return _container(value, meter, depth)
    return f"<{kind.__name__}>"


def _container(value: Any, meter: Meter, depth: int) -> str:
    if depth > _DEPTH:
        return "..."
    if type(value) is dict:
        pairs = (f"{_text(key, meter, depth + 1)}: {_text(part, meter, depth + 1)}" for key, part in value.items())
        return _joined("{", pairs, "}", meter)
    if not value and type(value) in (set, frozenset):
        return f"{type(value).__name__}()"
    opening, closing = _BRACKETS.get(type(value), "()")
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return _joined(opening, (_text(part, meter, depth + 1) for part in value), comma + closing, meter)


def _joined(opening: str, parts: Any, closing: str, meter: Meter) -> str:
    found: list[str] = []
    for part in parts:
        meter.text(len(part) + 2)
        found.append(part)
    return opening + ", ".join(found) + closing
