"""What decoders say of what they can't take."""

from __future__ import annotations

from insitu.block import ArgumentError, InsituError

__all__ = ["FormError", "WireError"]


class WireError(InsituError, ValueError):
    """What arrived is no message of insitu's, or is larger or deeper than the receiver takes.

    ``code``: ``"malformed"``, ``"too-large"``, ``"too-deep"``, or ``"unknown"``, a name that this version does not
    have.
    """

    def __init__(self, message: str, code: str = "malformed") -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return self.args[0]


class FormError(ArgumentError):
    """A request in the JSON form that can't be done as it is. ``path`` says where in it, as in ``$.actions[0].at``.

    ``code``: ``"malformed"`` (no JSON), ``"unknown-key"``, ``"invalid"`` (a value of another kind or out of its range),
    ``"unknown-place"``, ``"not-writable"``, ``"bad-vector"``, ``"bad-positions"``, ``"duplicate-name"``,
    ``"not-supported"`` or ``"too-large"``.
    """

    def __init__(self, message: str, code: str = "invalid", path: str = "$") -> None:
        super().__init__(message, code, path)
        self.code = code
        self.path = path

    def __str__(self) -> str:
        return self.args[0] if self.path == "$" else f"{self.args[0]} (at {self.path})"
