"""Which attributes of a value a restricted block gets, and which it may assign."""

from __future__ import annotations

import functools
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from insitu.guard import names
from insitu.guard.allowed import Allowed, Namespace
from insitu.guard.errors import NotAllowedError
from insitu.guard.kinds import names_of
from insitu.guard.methods import METHODS
from insitu.tree import ModelPlaces, Node, join, path_of
from insitu.tree.cache import Cache, Cached
from insitu.tree.source import Source

if TYPE_CHECKING:
    from insitu.guard.runtime import Runtime

__all__ = ["attribute", "require_stateless", "settable"]

_PLACES = frozenset({"output", "input", "inputs"})
_WRITABLE = frozenset({"logits", "samples", "embed", "pos_embed", "final_norm"})
_CALLED = frozenset({"skip", "next", "get", "apply_final_norm", "unembed"})
_STATELESS = re.compile(
    r"\w*(Norm|Norm2d|Linear|LinearBase|Embedding|LMHead|MLP|Mlp|AndMul|GELU|GELUActivation|SiLU|ReLU|ReLUSquaredActivation|"
    r"Identity|Dropout|ModuleList|Sequential|LogitsProcessor)(WithLoRA)?"
)


def attribute(runtime: Runtime, value: Any, name: str) -> Any:
    """``value.name``. Raises ``NotAllowedError`` if that is not in the list."""
    if type(name) is not str:
        raise TypeError(f"the name of an attribute is a text, not a {type(name).__name__}")
    if name.startswith("_"):
        raise NotAllowedError(f"`{name!r:.60}`: no attribute that a restricted block uses may begin with an underscore")
    if isinstance(value, torch.Tensor):
        return _of_tensor(runtime, value, name)
    if isinstance(value, Namespace):
        return value.get(name)
    if isinstance(value, ModelPlaces):
        return _of_model(value, name)
    if isinstance(value, Node):
        return _of_node(value, name)
    if isinstance(value, Source):
        return getattr(value, name)
    if isinstance(value, (Cache, Cached)) and not hasattr(type(value), name):
        return getattr(value, name)  # a module that was recorded
    return _by_class(runtime, value, name)


def settable(value: Any) -> frozenset[str]:
    """The attributes of a value that may be assigned."""
    if isinstance(value, ModelPlaces):
        return _WRITABLE
    return _PLACES if "insitu.tree.call.Call" in names_of(type(value)) else frozenset()


def require_stateless(node: Node) -> None:
    """Refuses to call a module that keeps something between calls, which is all requests' own (a KV cache, a state)."""
    outline, path = node._outline(), path_of(node)
    if outline is None:
        raise NotAllowedError(f"`{path}` can't be called: what modules there are is not known")
    pending = [path]
    while pending:
        each = pending.pop()
        kind = outline.modules[each].kind if each in outline else "?"
        if not _STATELESS.fullmatch(kind):
            raise NotAllowedError(
                f"`{path}` can't be called in a restricted block, as `{each}` is a {kind}: norms, linear and embedding "
                f"layers, activations and MLPs can"
            )
        pending += [join(each, child) for child in outline.children(each)]


def _of_tensor(runtime: Runtime, value: torch.Tensor, name: str) -> Any:
    if name in names.TENSOR_ATTRIBUTES:
        return getattr(value, name)
    if name not in names.TENSOR:
        hint = ": in a function write insitu.save(x)" if name == "save" else ""
        raise NotAllowedError(f"`Tensor.{name}` is not in the list of what a restricted block may use{hint}")
    own = METHODS["torch.Tensor"].get(name)
    method = getattr(value, name) if own is None else partial(own, runtime, value)
    return Allowed(method, f"Tensor.{name}", True)


def _of_model(value: ModelPlaces, name: str) -> Any:
    if name == "tokenizer":
        return _tokenizer(value)
    if name not in names.MODEL and hasattr(type(value), name):
        raise NotAllowedError(f"`model.{name}` is not in the list of what a restricted block may use")
    found = getattr(value, name)
    return Allowed(found, f"model.{name}") if name in _CALLED else found


def _of_node(value: Node, name: str) -> Any:
    allowed = names.ATTRIBUTES["insitu.tree.node.Node"]
    if name not in allowed and hasattr(type(value), name):
        raise NotAllowedError(f"`{path_of(value)}.{name}` is not in the list of what a restricted block may use")
    found = getattr(value, name)
    return Allowed(found, f"{path_of(value)}.{name}") if name in _CALLED else found


def _by_class(runtime: Runtime, value: Any, name: str) -> Any:
    for kind in names_of(type(value)):
        if name in names.ATTRIBUTES.get(kind, ()):
            own = METHODS.get(kind, {}).get(name)
            if own is not None:
                return Allowed(partial(own, runtime, value), f"{type(value).__name__}.{name}")
            found = _found(runtime, value, name)
            return Allowed(found, f"{type(value).__name__}.{name}") if callable(found) else found
    if "insitu.net.refs.Record" in names_of(type(value)) or (isinstance(value, tuple) and name in _fields(type(value))):
        return getattr(value, name)
    kind = type(value).__name__
    raise NotAllowedError(f"`{name}` of a {kind} is not in the list of what a restricted block may use")


def _found(runtime: Runtime, value: Any, name: str) -> Any:
    if name == "barrier":
        return lambda count: Allowed(lambda: None, "barrier")
    found = getattr(value, name)
    if isinstance(value, BaseException):
        return tuple(part if isinstance(part, (str, int, float, bool, type(None))) else str(part) for part in found)
    return found


@functools.lru_cache(maxsize=256)
def _fields(kind: type) -> tuple[str, ...]:
    """The names of the items of a named tuple, torch's kind included."""
    fields = getattr(kind, "_fields", None)
    if isinstance(fields, tuple):
        return tuple(name for name in fields if not name.startswith("_"))
    return tuple(getattr(kind, "__match_args__", ())) if kind.__module__ == "torch.return_types" else ()


def _tokenizer(model: Any) -> Namespace:
    tokenizer = model.tokenizer
    members: dict[str, Any] = {
        name: Allowed(partial(_tokenized, getattr(tokenizer, name)), f"tokenizer.{name}")
        for name in names.TOKENIZER
        if hasattr(tokenizer, name)
    }
    members |= {name: getattr(tokenizer, name, None) for name in names.TOKENIZER_VALUES}
    return Namespace("tokenizer", members)


def _tokenized(method: Any, given: Any, *, skip_special_tokens: bool = False, add_special_tokens: bool = True) -> Any:
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    settings = {"decode": {"skip_special_tokens": bool(skip_special_tokens)}}
    settings["encode"] = {"add_special_tokens": bool(add_special_tokens)}
    return method(given, **settings.get(method.__name__, {}))
