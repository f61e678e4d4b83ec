"""What goes wrong when a data set is captured."""

from __future__ import annotations

from insitu.block import InsituError


class CaptureError(InsituError, RuntimeError):
    """A capture can't be begun, gone on with or read; what was written before is kept."""
