"""The places of one call in the forward: a module's, or an operation's."""

from __future__ import annotations

from typing import Any

from insitu.tree.place import Place
from insitu.tree.session import Session, session_for


class Call:
    """What modules and operations have in common: places, and that they can be skipped."""

    __slots__ = ()

    _path: str
    _op: str
    _lister: Any
    """Asks the model for operations; stands for the model, too."""

    @property
    def output(self) -> Any:
        """What it returns, this request's rows: ``[tokens, width]`` on the prefill step, ``[1, width]``
        on each decode step, in the model's dtype and on its device. Tuples, lists and dicts keep their
        structure; a tensor that does not go by tokens is passed whole, and can't be edited.

        In-place operations edit what the model goes on with; assigning replaces it (same shape;
        another floating dtype or device is converted).
        """
        return self._session("output").read(self._place("output"))

    @output.setter
    def output(self, value: Any) -> None:
        self._session("output").write(self._place("output"), value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with, as ``(args, kwargs)``; rows and edits as in ``output``."""
        return self._session("inputs").read(self._place("input"))

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._session("inputs").write(self._place("input"), value)

    @property
    def input(self) -> Any:
        """The first argument that it is called with; rows and edits as in ``output``."""
        return first_argument(self.inputs)

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self.inputs
        if args:
            self.inputs = ((value, *args[1:]), kwargs)
        else:
            first = next(iter(kwargs))
            self.inputs = ((), {**kwargs, first: value})

    def skip(self, value: Any) -> None:
        """It does not run for this request, and ``value`` is its output, whose structure and shapes it
        must have. Other requests in the step are untouched. The block goes on from its output.

        Raises ``WriteError`` for a value that does not fit.
        """
        self._session("skip").skip(self._place("output"), value)

    def _unsavable(self) -> str:
        call = self._place("output").call
        return f"`{call}` is a module or operation and no value: save `{call}.output` or `{call}.input`"

    def _place(self, site: str) -> Place:
        return Place(self._path, site, self._op)

    def _session(self, site: str) -> Session:
        return session_for(self._place(site), self._lister)


def first_argument(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """What ``.input`` is, of ``.inputs``."""
    args, kwargs = inputs
    return args[0] if args else next(iter(kwargs.values()), None)
