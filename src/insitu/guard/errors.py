"""What a restricted block meets when it asks for too much."""

from __future__ import annotations

from insitu.block.errors import LimitError as LimitError
from insitu.block.errors import NotAllowedError as NotAllowedError

__all__ = ["Exceeded", "LimitError", "NotAllowedError"]


class Exceeded(BaseException):
    """Raised in a block that goes on beyond a limit. Blocks can't catch it; ``LimitError`` is what leaves them."""
