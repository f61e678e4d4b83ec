"""What an object consists of, as far as a block may change it, and how another's is put into it."""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .modules import is_users_class

_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_BAGS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
_OF_CLASSES = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)

_NOT_WATCHED = ("builtins", "functools", "types", "typing", "abc", __name__.partition(".")[0])

Name = tuple[str, str]


@dataclass
class State:
    """``items`` of a container, else None; ``names`` are attributes, variables and the content of a cell."""

    items: Any
    names: dict[Name, Any]

    def parts(self) -> Iterator[tuple[Any, Any]]:
        """Each part with a key that ``part`` finds it by."""
        pairs: Any = ()
        if isinstance(self.items, dict):
            pairs = self.items.items()
        elif isinstance(self.items, list):
            pairs = enumerate(self.items)
        yield from (((0, key), value) for key, value in pairs)
        yield from (((1, key), value) for key, value in self.names.items())

    def part(self, key: Any) -> Any:
        where, name = key
        return self.names[name] if where else self.items[name]


def has_state(value: Any) -> bool:
    """Whether ``value`` is a container, or has attributes or variables that its user may change."""
    if isinstance(value, (*_BASES, types.CellType)):
        return True
    if isinstance(value, type):
        return is_users_class(value) and not isinstance(value, enum.EnumMeta)
    if isinstance(value, types.FunctionType):
        return is_users_class(value)
    return _is_open(value)


def _is_open(value: Any) -> bool:
    """Whether it is an object of whose attributes it may be told."""
    torch = sys.modules.get("torch")
    kind = type(value)
    return (
        isinstance(value, _BAGS)
        or (torch is not None and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)))
        or (is_users_class(kind) and not isinstance(value, (type, types.ModuleType, enum.Enum)))
    )


def is_other(value: Any) -> bool:
    """Whether it is an object of an installed package that has attributes and no known parts."""
    kind = type(value)
    plain = isinstance(value, (type, types.ModuleType, types.FunctionType, enum.Enum, BaseException))
    home = kind.__module__.partition(".")[0]
    return not plain and home not in _NOT_WATCHED and isinstance(getattr(value, "__dict__", None), dict)


def state_of(node: Any) -> State:
    if isinstance(node, types.CellType):
        return State(None, {("cell", ""): node.cell_contents} if _is_bound(node) else {})
    if isinstance(node, type):
        return State(None, {("class", name): value for name, value in vars(node).items() if _is_data(name, value)})
    if isinstance(node, types.FunctionType):
        bound = {("global", name): node.__globals__[name] for name in _stored(node) if name in node.__globals__}
        return State(None, {**bound, **_attributes(node)})
    return State(_items(node), _attributes(node))


def put(node: Any, items: Any, names: Mapping[Name, Any], gone: Iterator[Name] | list[Name]) -> None:
    """Gives ``node`` the ``items``, unless they are None, and the ``names``, and takes those ``gone`` away."""
    if items is not None:
        _put_items(node, items)
    for name in gone:
        _delete(node, *name)
    for name, value in names.items():
        _set(node, *name, value)


def inside(value: Any) -> Iterator[Any]:
    """What can be reached from ``value`` in one step and travels with it."""
    if isinstance(value, (tuple, frozenset)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, (classmethod, staticmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, types.FunctionType) and is_users_class(value):
        yield from value.__closure__ or ()
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (value.__globals__[name] for name in _globals(value.__code__) if name in value.__globals__)
        yield from vars(value).values()
    elif isinstance(value, type):
        if has_state(value):
            yield from value.__bases__
            yield from (each for name, each in vars(value).items() if not _is_hidden(name) or callable(each))
    elif has_state(value):
        yield type(value)
        yield from _travelling(value)


def _travelling(value: Any) -> Iterator[Any]:
    """The parts of an object that pickle takes along: a class may have its own mind about that."""
    kind = type(value)
    if is_users_class(kind):
        if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ not in _REDUCES:
            return
        if getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None):
            taken = value.__getstate__()
            yield from taken.values() if isinstance(taken, dict) else ()
            return
    state = state_of(value)
    yield from state.items if isinstance(state.items, set) else (part for _, part in state.parts())


_REDUCES = [each.__reduce__ for each in (object, OrderedDict, set, deque)]


def _items(node: Any) -> Any:
    for base in _BASES:
        if isinstance(node, base):
            if issubclass(base, dict):
                return dict(base.items(node))
            return set(set.__iter__(node)) if base is set else list(base.__iter__(node))
    return None


def _put_items(node: Any, items: Any) -> None:
    base = next(base for base in _BASES if isinstance(node, base))
    base.clear(node)
    if issubclass(base, dict):
        for key, value in items.items():
            base.__setitem__(node, key, value)
    elif base is set:
        set.update(node, items)
    else:
        base.extend(node, items)


def _attributes(node: Any) -> dict[Name, Any]:
    found: dict[Name, Any] = {}
    for kind in type(node).__mro__ if is_users_class(type(node)) else ():
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found["attribute", name] = member.__get__(node)
                except AttributeError:  # not set
                    continue
    own = getattr(node, "__dict__", None)
    return {**found, **{("attribute", name): value for name, value in own.items()}} if isinstance(own, dict) else found


def _set(node: Any, where: str, name: str, value: Any) -> None:
    if where == "cell":
        node.cell_contents = value
    elif where == "global":
        node.__globals__[name] = value
    elif where == "class":
        type.__setattr__(node, name, value)
    elif _in_slot(node, name):
        object.__setattr__(node, name, value)
    else:
        vars(node)[name] = value


def _delete(node: Any, where: str, name: str) -> None:
    if where == "cell":
        del node.cell_contents
    elif where == "global":
        node.__globals__.pop(name, None)
    elif where == "class":
        type.__delattr__(node, name)
    elif _in_slot(node, name):
        object.__delattr__(node, name)
    else:
        vars(node).pop(name, None)


def _in_slot(node: Any, name: str) -> bool:
    # The class that a worker makes of one that has slots may have none.
    found = next((vars(kind)[name] for kind in type(node).__mro__ if name in vars(kind)), None)
    return isinstance(found, types.MemberDescriptorType)


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_hidden(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name.startswith("_abc_")


def _is_data(name: str, value: Any) -> bool:
    return not _is_hidden(name) and not isinstance(value, _OF_CLASSES)


def _stored(function: types.FunctionType) -> list[str]:
    return [name for name, stored in _globals(function.__code__).items() if stored]


@functools.lru_cache(maxsize=1024)
def _globals(code: types.CodeType) -> dict[str, bool]:
    """The names of its module that ``code`` uses, and whether it binds them."""
    found: dict[str, bool] = {}
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            found[one.argval] = found.get(one.argval, False) or one.opname.startswith(("STORE", "DELETE"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, stored in _globals(constant).items():
                found[name] = found.get(name, False) or stored
    return found
