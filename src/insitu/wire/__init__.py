"""Blocks, values and errors as bytes, between this process and its own workers.

Nothing here is for the network: what is unpickled was pickled by the same user's own process.
"""

from .errors import shortened
from .port import Port
from .shared import Shared, apply, changeable

__all__ = ["Port", "Shared", "apply", "changeable", "shortened"]
