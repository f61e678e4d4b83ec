"""The one link from a name in a block to the run that serves it.

Nodes and tracers are the same objects in the caller and in the engine; what makes
``module.output`` mean something is the session of the block that is running right now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from insitu.block import OutsideTraceError
from insitu.tree.place import Place

if TYPE_CHECKING:
    from insitu.tree.source import Listing


class Session(Protocol):
    """What a running block offers to the names in it."""

    def read(self, place: Place) -> Any:
        """The value at ``place`` in this step, once the forward gets there."""
        ...

    def write(self, place: Place, value: Any) -> None:
        """Replaces what the model goes on with at ``place``, for this request alone."""
        ...

    def skip(self, place: Place, value: Any) -> None:
        """Makes ``value`` the output ``place`` of a call that does not run for this request."""
        ...

    def operations(self, path: str, op: str) -> Listing:
        """The text of a module's forward, or of the function that an operation in it calls."""
        ...

    owner: object
    """Stands for the model that the block runs beside."""

    step: int
    """The step whose places the block reads; 0 is the prefill."""

    def go_to(self, step: int) -> bool:
        """Waits until ``step`` begins; False if the request ends before."""
        ...

    def move_on(self) -> None:
        """From here on the block reads the places of the next step."""
        ...

    def stop(self) -> None:
        """Makes this step the request's last."""
        ...

    @property
    def seen(self) -> int:
        """How many steps of the request have begun."""
        ...

    length: int | None
    """How many steps the request will have, if that is certain."""

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies the module at ``path`` to values of the block."""
        ...

    prompt: Sequence[int] | None
    """Token ids of the prompt; None if it was given by embeddings."""

    def drawn_ids(self) -> list[int]:
        """The ids drawn in the steps before this one."""
        ...

    def cache(self, modules: Any, **settings: Any) -> Any:
        """Records every visit of the given modules from here on; returns what it is recorded in."""
        ...

    def read_stream(self, name: str, layer: int | None) -> Any:
        """The value of a standard name, at one layer or of the whole model."""
        ...

    def write_stream(self, name: str, layer: int | None, value: Any) -> None:
        """Replaces it."""
        ...

    def apply_norm(self, hidden: Any) -> Any:
        """The norm before the unembedding, applied to values of the block."""
        ...

    def unembed(self, hidden: Any) -> Any:
        """The model's own logits for rows of the normed stream."""
        ...


current: ContextVar[Session | None] = ContextVar("insitu_session", default=None)


def session_for(what: str | Place, owner: object = None) -> Session:
    """The session of the running block, which asks for ``what``.

    ``OutsideTraceError`` if there is none, or if it is a block of another model than the one that ``owner`` stands for.
    """
    session = current.get()
    if session is None:
        raise OutsideTraceError(
            f"{_named(what)} exists only while the model runs: read it inside `with model.trace(prompt):` "
            f"or `with tracer.invoke(prompt):` and keep it with `.save()`"
        )
    if owner is not None and session.owner is not None and session.owner != owner:
        raise OutsideTraceError(
            f"{_named(what)} belongs to another model than the one that this block runs beside; trace that one by "
            f"itself"
        )
    return session


def _named(what: str | Place) -> str:
    return f"`{what}`" if isinstance(what, Place) else what
