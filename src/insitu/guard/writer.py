"""How a restricted block assigns and deletes attributes and items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insitu.guard.attributes import settable
from insitu.guard.errors import NotAllowedError

if TYPE_CHECKING:
    from insitu.guard.runtime import Runtime

__all__ = ["Writer"]


class Writer:
    """What stands for a value where something in it is assigned."""

    __slots__ = ("_runtime", "_value")

    def __init__(self, runtime: Runtime, value: Any) -> None:
        object.__setattr__(self, "_runtime", runtime)
        object.__setattr__(self, "_value", value)

    def __setattr__(self, name: str, new: Any) -> None:
        runtime, value = object.__getattribute__(self, "_runtime"), object.__getattribute__(self, "_value")
        runtime.meter.tick()
        if name not in settable(value):
            raise NotAllowedError(f"`{name}` of a {type(value).__name__} can't be assigned in a restricted block")
        runtime.operators.given(new)
        setattr(value, name, new)

    def __setitem__(self, index: Any, new: Any) -> None:
        runtime, value = object.__getattribute__(self, "_runtime"), object.__getattribute__(self, "_value")
        runtime.meter.tick()
        if isinstance(value, dict):
            value[runtime.operators.hashable(index)] = new
        elif isinstance(value, list):
            if isinstance(index, slice):
                new = list(runtime.iterable(new))
                runtime.meter.items(len(value) + len(new))
            value[index] = new
        elif isinstance(value, runtime.writable):
            runtime.operators.given(index, new)
            value[runtime.index(index)] = new
        else:
            raise NotAllowedError(f"items of a {type(value).__name__} can't be assigned in a restricted block")

    def __delitem__(self, index: Any) -> None:
        runtime, value = object.__getattribute__(self, "_runtime"), object.__getattribute__(self, "_value")
        runtime.meter.tick(1 + len(value) // 64 if isinstance(value, list) else 1)
        if not isinstance(value, (dict, list)):
            raise NotAllowedError(f"items of a {type(value).__name__} can't be deleted in a restricted block")
        del value[runtime.operators.hashable(index) if isinstance(value, dict) else index]

    def __delattr__(self, name: str) -> None:
        raise NotAllowedError(f"`{name}` can't be deleted in a restricted block")
