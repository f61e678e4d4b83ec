"""The one error of the decoders."""

from __future__ import annotations

from insitu.block import InsituError

__all__ = ["WireError"]


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
