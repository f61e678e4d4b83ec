"""What a restricted block meets when it asks for too much."""

from __future__ import annotations

from typing import Any

from insitu.block.errors import LimitError as LimitError
from insitu.block.errors import NotAllowedError as NotAllowedError

__all__ = ["Exceeded", "LimitError", "NotAllowedError", "catchable"]


class Exceeded(BaseException):
    """Raised in a block that goes on beyond a limit. Blocks can't catch it; ``LimitError`` is what leaves them."""


def catchable(*kinds: Any) -> Any:
    """What a handler may catch: exceptions, and never what a limit raises."""
    if not kinds:
        return Exception
    (given,) = kinds
    for kind in given if isinstance(given, tuple) else (given,):
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise NotAllowedError("`except` takes exceptions that are in the list")
    return given
