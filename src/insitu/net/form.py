"""The JSON form of a block, for those who have no Python or may not send code.

A form is a list of actions: read a place, add a vector there, project one out, set one, or scale what is there, at some
positions and in some steps. ``parsed`` checks one, and ``form_block`` makes of it a function of the tracer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from insitu.net.errors import FormError

__all__ = ["Action", "Add", "AtText", "Form", "ProjectOut", "Read", "Scale", "Set", "parsed", "schema"]

_Name = Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z0-9_]{0,63}$")]
_Place = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=300,
        description="A standard name, `resid_post[6]` or `logits`, or a module's place, `model.layers.6.mlp.output`, "
        "`model.layers.6.output[0]`",
    ),
]
_Vector = Annotated[list[float], Meta(min_length=1, max_length=1_000_000)]
_Step = Annotated[int, Meta(ge=0, le=1_000_000)]
When = (
    Literal["prompt", "generated", "all"]
    | _Step
    | Annotated[list[_Step], Meta(min_length=1, max_length=4096, description="Rising")]
)
_TOTAL = 4_000_000
_LARGEST = (2 - 2**-23) * 2.0**127
"""Of the numbers of float32, in which edits are computed."""


class AtText(Struct, forbid_unknown_fields=True, frozen=True):
    """The tokens of the prompt that a text lies in."""

    text: Annotated[str, Meta(min_length=1, max_length=10_000)]
    occurrence: int = 0


Positions = Literal["all", "last"] | Annotated[list[int], Meta(min_length=1, max_length=65_536)] | AtText


class _At(Struct, forbid_unknown_fields=True, frozen=True, tag_field="do", kw_only=True):
    at: _Place
    positions: Positions = "all"
    """Rows of the step: all of them, the last, these (negative ones from the end), or those of a text."""
    when: When = "prompt"
    """The step of the prompt, those of generated tokens, all of them, the k-th (0 is the prompt's), or these."""


class Read(_At, forbid_unknown_fields=True, frozen=True, tag="read", kw_only=True):
    """Give back what is there: one tensor for one step, and a list of them for several."""

    name: _Name = msgspec.field(name="as")


class Add(_At, forbid_unknown_fields=True, frozen=True, tag="add", kw_only=True):
    """Add ``scale * vector`` to each row; with ``match_norm`` a vector of ``scale`` times the row's own norm."""

    vector: _Vector
    scale: float = 1.0
    match_norm: bool = False


class Set(_At, forbid_unknown_fields=True, frozen=True, tag="set", kw_only=True):
    """Make each row ``scale * vector``; with ``match_norm`` a vector of ``scale`` times the row's norm before."""

    vector: _Vector
    scale: float = 1.0
    match_norm: bool = False


class ProjectOut(_At, forbid_unknown_fields=True, frozen=True, tag="project_out", kw_only=True):
    """Take ``scale`` times its part along the vector from each row."""

    vector: _Vector
    scale: float = 1.0


class Scale(_At, forbid_unknown_fields=True, frozen=True, tag="scale", kw_only=True):
    """Multiply each row by ``scale``."""

    scale: float


Action = Read | Add | Set | ProjectOut | Scale


class Form(Struct, forbid_unknown_fields=True, frozen=True):
    """Actions, done in the order in which the model comes to their places, and at one place in this order."""

    actions: Annotated[list[Action], Meta(min_length=1, max_length=256)]


_STANDARD = re.compile(r"(?P<name>[a-z_]+)(?:\[(?P<layer>-?\d{1,6})\])?")
_MODULE = re.compile(r"(?P<path>[A-Za-z0-9_.]+)\.(?P<site>output|input)(?:\[(?P<part>\d{1,2})\])?")
WHOLE = ("embed", "pos_embed", "final_norm", "logits")
BY_LAYER = (
    "resid_pre",
    "q",
    "k",
    "v",
    "attn_pattern",
    "attn_out",
    "resid_mid",
    "router_logits",
    "mlp_out",
    "resid_post",
)
_ONLY_READ = ("attn_pattern",)


def schema() -> dict[str, Any]:
    """The JSON Schema of a form, as ``form.schema.json`` has it."""
    return msgspec.json.schema(Form)


def parsed(data: bytes | str | dict[str, Any]) -> Form:
    """The form that JSON is. Raises ``FormError``, whose ``code`` and ``path`` say what is wrong where."""
    try:
        form = msgspec.convert(data, Form) if isinstance(data, dict) else msgspec.json.decode(data, type=Form)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        code = "unknown-key" if "unknown field" in message else "invalid"
        raise FormError(message, code, path.rstrip("`") or "$") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormError(f"this is no JSON: {error}", "malformed") from None
    _check(form)
    return form


def _check(form: Form) -> None:
    names: set[str] = set()
    total = 0
    for number, action in enumerate(form.actions):
        path = f"$.actions[{number}]"
        _check_place(action, f"{path}.at")
        _check_rows(action, path)
        if isinstance(action, Read):
            if action.name in names:
                raise FormError(f"two reads have the name {action.name!r}", "duplicate-name", f"{path}.as")
            names.add(action.name)
            continue
        if not _is_number(action.scale):
            raise FormError("scale is a finite number of float32", "invalid", f"{path}.scale")
        if not isinstance(action, Scale):
            total += len(action.vector)
            _check_vector(action, f"{path}.vector")
    if total > _TOTAL:
        raise FormError(f"the vectors have {total} numbers altogether, more than {_TOTAL}", "too-large", "$.actions")


def _check_place(action: Action, path: str) -> None:
    found = _STANDARD.fullmatch(action.at)
    if found is None:
        if _MODULE.fullmatch(action.at) is None or any(part.startswith("_") for part in action.at.split(".")):
            raise FormError(f"{action.at!r} is no place", "unknown-place", path)
        return
    name, layer = found["name"], found["layer"]
    if name not in (WHOLE if layer is None else BY_LAYER):
        hint = f": {name}[i] is the one of layer i" if name in BY_LAYER else ""
        raise FormError(f"{action.at!r} is no place{hint}", "unknown-place", path)
    if name in _ONLY_READ and not isinstance(action, Read):
        raise FormError(f"{name} can be read but not edited", "not-writable", path)
    if name in _ONLY_READ and action.when not in ("prompt", 0):
        raise FormError(f"{name} is read of the prompt's step alone; a block reads it in others", "not-supported", path)


def _check_rows(action: Action, path: str) -> None:
    steps = action.when
    if isinstance(steps, list) and steps != sorted(set(steps)):
        raise FormError("steps are given in rising order", "invalid", f"{path}.when")
    if steps not in ("prompt", 0, [0]) and not isinstance(action.positions, str):
        raise FormError(
            "positions are those of the prompt, and a later step has one row: leave positions out, or when",
            "bad-positions",
            f"{path}.positions",
        )


def _check_vector(action: Add | Set | ProjectOut, path: str) -> None:
    if not all(map(_is_number, action.vector)):
        raise FormError("a vector has finite numbers of float32", "bad-vector", path)
    directed = isinstance(action, ProjectOut) or action.match_norm
    if directed and not any(action.vector):
        raise FormError("a vector of zeros has no direction", "bad-vector", path)


def _is_number(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST


def order(actions: Sequence[Action]) -> list[int]:
    """Numbers of actions in the order of the forward, told by their standard names. With a module's place among
    them, which only its author knows the order of, it is theirs."""
    keys = []
    for number, action in enumerate(actions):
        found = _STANDARD.fullmatch(action.at)
        if found is None:
            return list(range(len(actions)))
        name, layer = found["name"], found["layer"]
        if layer is None:
            keys.append((WHOLE.index(name) if name in WHOLE[:2] else math.inf, WHOLE.index(name), 0, number))
        else:
            keys.append((len(WHOLE), int(layer), BY_LAYER.index(name), number))
    return [number for *_, number in sorted(keys)]


def parts(place: str) -> tuple[str, str | int | None, int | None]:
    """A place's name and layer, or a module's path and site, and the part of what is there that is meant."""
    found = _STANDARD.fullmatch(place)
    if found is not None:
        return found["name"], None if found["layer"] is None else int(found["layer"]), None
    module = _MODULE.fullmatch(place)
    assert module is not None, "places were checked"
    return module["path"], module["site"], None if module["part"] is None else int(module["part"])
