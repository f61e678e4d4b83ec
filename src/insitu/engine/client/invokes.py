"""Several invokes in one trace: which waits for which, and what they bring home together."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from insitu.block import Block, RequestError, user_traceback
from insitu.block.flow import exposed

if TYPE_CHECKING:
    from insitu.engine.client.result import Prepared, Result


@dataclass(eq=False)
class Invocation:
    """One invoke: its block with the values it found, its prompt, and in the end its result."""

    index: int
    block: Block
    values: dict[str, Any]
    module_name: str
    prepared: Prepared
    needs: dict[str, Invocation] = field(default_factory=dict)
    exports: set[str] = field(default_factory=set)
    result: Result | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What the block finds: the trace's own names, and those that earlier invokes have bound."""
        passed: dict[str, Any] = {}
        for name, other in self.needs.items():
            assert other.result is not None, "invokes run after those that they need"
            passed.update(other.result.bound(name))
        return {**self.values, **passed}

    @property
    def hindrance(self) -> RequestError | None:
        """Why this invoke can't run: it needs one that failed."""
        for name, other in self.needs.items():
            if other.result is not None and other.result.error is not None:
                return RequestError(
                    f"invoke {self.index} was not run: it reads `{name}` of invoke {other.index}, which failed"
                )
        return None


def waves(invocations: Sequence[Invocation]) -> Iterator[list[Invocation]]:
    """The invokes in groups to be run one after the other.

    An invoke that reads a name which an earlier one binds comes in a later group; all others run together.
    """
    last: dict[str, Invocation] = {}
    depth: dict[Invocation, int] = {}
    for one in invocations:
        one.needs = {name: last[name] for name in exposed(one.block.code) if name in last}
        for name, other in one.needs.items():
            other.exports.add(name)
        depth[one] = 1 + max((depth[other] for other in one.needs.values()), default=-1)
        last.update(dict.fromkeys(one.block.binds, one))
    for level in range(max(depth.values(), default=-1) + 1):
        yield [one for one in invocations if depth[one] == level]


def hint_at_order(error: NameError, invocations: Sequence[Invocation]) -> None:
    """Says in ``error``, which the body around the invokes raised, that what an invoke binds is not there yet."""
    name = getattr(error, "name", None)
    if any(name in one.block.binds for one in invocations):
        error.args = (
            f"{error}: an invoke binds it, and invokes run after the body around them has ended. Read `{name}` in a "
            f"later invoke, or after the trace",
        )


def merged_saves(invocations: Sequence[Invocation]) -> dict[str, Any]:
    """A name saved by one invoke as itself, by several as a list in order.

    An invoke that failed has ``None`` in its place in such a list.
    """
    done = [(one, one.result) for one in invocations if one.result is not None]
    names = dict.fromkeys(name for _, result in done if result.error is None for name in result.saves)
    saved: dict[str, list[Any]] = {name: [] for name in names}
    for one, result in done:
        for name in names:
            if result.error is not None:
                if name in one.block.binds:
                    saved[name].append(None)
            elif name in result.saves:
                saved[name].append(result.saves[name])
    return {name: values[0] if len(values) == 1 else values for name, values in saved.items()}


def merged_error(results: Sequence[Any], what: str = "invokes") -> BaseException | None:
    """The error of the one of ``results`` that has one, or a group of several. Each has ``.invoke``, its index."""
    errors: list[BaseException] = []
    for index, result in enumerate(results):
        error = result.error
        if isinstance(error, KeyboardInterrupt):
            return error
        if error is not None:
            error.invoke = index  # type: ignore[attr-defined]
            error.__traceback__ = user_traceback(error)
            errors.append(error)
    if len(errors) < 2:
        return errors[0] if errors else None
    group = getattr(builtins, "BaseExceptionGroup", None)
    if group is None:  # Python 3.10
        group = importlib.import_module("exceptiongroup").BaseExceptionGroup
    return group(f"{len(errors)} of {len(results)} {what} failed", errors)
