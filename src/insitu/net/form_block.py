"""A form as a block: a function of the tracer, which does what an ordinary block would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from insitu.block import InsituError, LimitError, NotReachedError
from insitu.net.errors import FormError
from insitu.net.form import Action, Add, AtText, Form, ProjectOut, Read, Scale, Set, order, parts
from insitu.tree import current

__all__ = ["FormBlock", "form_block"]


def form_block(form: Form, model: Any, saved_bytes: int | None = None) -> FormBlock:
    """The function that does the form beside ``model``; returns what was read, by name.

    ``saved_bytes``: how much it may read altogether. Tensors that are not the request's alone are withheld.

    Raises ``FormError`` with the code ``"unknown-place"`` for a layer or module that the model does not have. In the
    block it is raised for a vector or positions that don't fit, and ``NotReachedError`` for a step that the request
    ended before, ``LimitError`` for more than ``saved_bytes``.
    """
    return FormBlock(form, model, saved_bytes)


class FormBlock:
    """What a form does, as a function of the tracer. Of a class, and not a closure, so that it pickles by its name."""

    def __init__(self, form: Form, model: Any, saved_bytes: int | None) -> None:
        self._model = model
        self.saved_bytes = saved_bytes
        self._actions = actions = [_on(model, each, f"$.actions[{number}]") for number, each in enumerate(form.actions)]
        self._placed = [(actions[number], f"$.actions[{number}]") for number in order(actions)]

    @property
    def same_for_rows(self) -> bool:
        """Whether it does the same to every row of every step."""
        return all(
            action.when == action.positions == "all" and not isinstance(action, Read) for action in self._actions
        )

    def __call__(self, tracer: Any) -> dict[str, Any]:
        session: Any = current.get()
        session.withholds = True
        return self._done(tracer, _Found(self.saved_bytes), Vectors())

    def written(self, tracer: Any, vectors: Vectors) -> dict[str, Any]:
        """The same with names in place of values, which is counted otherwise."""
        return self._done(tracer, _Found(None), vectors)

    def _done(self, tracer: Any, found: _Found, vectors: Vectors) -> dict[str, Any]:
        steps = _steps(self._actions)
        if steps == [0]:
            _do(self._model, tracer, self._placed, 0, found, vectors)
        else:
            seen = -1
            for seen in tracer.iter[:] if steps is None else tracer.iter[steps]:
                _do(self._model, tracer, self._placed, seen, found, vectors)
            _require_reached(self._actions, seen)
        return {action.name: found.of(action) for action in self._actions if isinstance(action, Read)}

    def within(self, read: Mapping[str, Any], steps: int) -> dict[str, Any]:
        """What was read in so many steps: vLLM looks for stop texts when one more may have begun."""
        found = dict(read)
        for action in self._actions:
            if isinstance(action, Read) and isinstance(found.get(action.name), list):
                found[action.name] = found[action.name][: _count(action, steps)]
        return found


def _count(action: Action, steps: int) -> int:
    """How many of so many steps an action is for."""
    if isinstance(action.when, list):
        return sum(step < steps for step in action.when)
    return max(steps - 1, 0) if action.when == "generated" else steps


class Vectors:
    """The vectors of a form, by where in it they are; of length 1 where only the direction counts."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def of(self, action: Add | Set | ProjectOut, rows: Any, path: str) -> Any:
        """For these rows. Raises ``FormError`` if they have another width."""
        width = self.width(rows)
        if len(action.vector) != width:
            raise FormError(
                f"the vector has {len(action.vector)} numbers, and {action.at!r} is {width} wide",
                "bad-vector",
                f"{path}.vector",
            )
        if path not in self._made:
            self._made[path] = self.beside(rows, _vector(action))
        return self._made[path]

    def width(self, rows: Any) -> int:
        """How many numbers a row has."""
        return rows.shape[1:].numel()

    def beside(self, rows: Any, vector: Any) -> Any:
        """The vector as the rows are calculated with."""
        return vector.to(rows.device)


class _Found:
    """What has been read, by name."""

    def __init__(self, room: int | None) -> None:
        self._values: dict[str, list[Any]] = {}
        self._room = self._limit = room

    def add(self, name: str, value: Any) -> None:
        if self._room is not None:
            self._room -= value.numel() * value.element_size()
            if self._room < 0:
                raise LimitError(f"this form reads more than {self._limit} bytes")
        self._values.setdefault(name, []).append(value)

    def of(self, action: Read) -> Any:
        """One value for one step, or a list of them."""
        values = self._values.get(action.name, [])
        return values[0] if action.when == "prompt" or isinstance(action.when, int) else values


def _on(model: Any, action: Action, path: str) -> Action:
    """The action with its layer counted from 0. Raises ``FormError`` if the model has no such place."""
    name, at, _ = parts(action.at)
    try:
        if isinstance(at, str):
            model.get(name)
        elif at is not None:
            count = len(model.resid_post)
            if not -count <= at < count:
                raise IndexError(f"the model has {count} layers, 0 to {count - 1}")
            return _replaced(action, f"{name}[{at % count}]")
    except (InsituError, LookupError) as error:
        raise FormError(f"{action.at!r}: {error}", "unknown-place", f"{path}.at") from None
    return action


def _replaced(action: Any, at: str) -> Any:
    return msgspec.structs.replace(action, at=at)


def _steps(actions: Sequence[Action]) -> list[int] | None:
    """The steps to be in; None is all."""
    found: set[int] = set()
    for action in actions:
        if action.when in ("generated", "all"):
            return None
        found.update(
            [0] if action.when == "prompt" else action.when if isinstance(action.when, list) else [action.when]
        )
    return sorted(found)


def _is_in(action: Action, step: int) -> bool:
    when = action.when
    if isinstance(when, str):
        return when == "all" or (step == 0) == (when == "prompt")
    return step in when if isinstance(when, list) else step == when


def _require_reached(actions: Sequence[Action], last: int) -> None:
    for number, action in enumerate(actions):
        wanted = action.when if isinstance(action.when, list) else [action.when]
        late = [step for step in wanted if isinstance(step, int) and step > last]
        if late:
            raise NotReachedError(
                f"$.actions[{number}] was to reach step {late[0]}, but the request ended after {last + 1} steps: raise "
                f"max_tokens"
            )


def _do(
    model: Any,
    tracer: Any,
    placed: Sequence[tuple[Action, str]],
    step: int,
    found: _Found,
    vectors: Vectors,
) -> None:
    for action, path in placed:
        if not _is_in(action, step):
            continue
        value = _tensor(model, action, path)
        rows = value.transpose(0, 1) if action.at.startswith("attn_pattern[") else value
        index = _index(tracer, action, rows, path)
        if isinstance(action, Read):
            read = rows[index].clone()
            found.add(action.name, read.transpose(0, 1) if rows is not value else read)
        else:
            rows[index] = _edited(action, rows[index], vectors, path)


def _tensor(model: Any, action: Action, path: str) -> Any:
    name, at, part = parts(action.at)
    if not isinstance(at, str):
        return getattr(model, name) if at is None else getattr(model, name)[at]
    value = getattr(model.get(name), at)
    if isinstance(value, (tuple, list)):
        if part is None or part >= len(value):
            raise FormError(
                f"{action.at!r} is {len(value)} values: say which, `{name}.{at}[0]`", "unknown-place", f"{path}.at"
            )
        value = value[part]
    elif part is not None:
        raise FormError(f"{action.at!r} is one value: leave out `[{part}]`", "unknown-place", f"{path}.at")
    if not hasattr(value, "is_floating_point") or not value.dim():
        raise FormError(f"{action.at!r} is no tensor with rows", "unknown-place", f"{path}.at")
    return value


def _index(tracer: Any, action: Action, value: Any, path: str) -> Any:
    positions = action.positions
    if positions == "all":
        return slice(None)
    if positions == "last":
        return slice(-1, None)
    if isinstance(positions, AtText):
        return list(tracer.positions_of(positions.text, occurrence=positions.occurrence))
    assert isinstance(positions, list)
    rows = value.shape[0]
    for position in positions:
        if not -rows <= position < rows:
            raise FormError(f"position {position} of {rows}, 0 to {rows - 1}", "bad-positions", f"{path}.positions")
    if len({position % rows for position in positions}) != len(positions):
        raise FormError("a position comes twice", "bad-positions", f"{path}.positions")
    return positions


def _edited(action: Action, rows: Any, vectors: Vectors, path: str) -> Any:
    if isinstance(action, Scale):
        return rows * action.scale
    assert isinstance(action, (Add, Set, ProjectOut))
    vector = vectors.of(action, rows, path)
    is_flat = _has_flat_rows(action)
    flat = rows.float() if is_flat else rows.reshape(rows.shape[0], -1).float()
    if isinstance(action, ProjectOut):
        made = flat - action.scale * (flat @ vector)[:, None] * vector
    else:
        change = action.scale * vector
        if action.match_norm:
            change = action.scale * flat.norm(dim=-1, keepdim=True) * vector
        made = flat + change if isinstance(action, Add) else change
    if is_flat:
        return made
    return (made if isinstance(action, (Add, ProjectOut)) else made.expand_as(flat)).reshape(rows.shape)


def _has_flat_rows(action: Action) -> bool:
    """Whether a row is one list of numbers, as at all standard names but those of heads."""
    name, at, _ = parts(action.at)
    return not isinstance(at, str) and name not in ("q", "k", "v", "attn_pattern")


def _vector(action: Add | Set | ProjectOut) -> Any:
    import torch

    made = torch.tensor(action.vector, dtype=torch.float64)
    if isinstance(action, ProjectOut) or action.match_norm:
        made /= made.abs().max()  # or its squares might be beyond the numbers that there are
        made /= made.norm()
    return made.to(torch.float32)
