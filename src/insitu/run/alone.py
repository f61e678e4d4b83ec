"""What a model that lies over several processes has done otherwise, as it is where the model lies in one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from insitu.run.followed import News


class Alone:
    """``windowed``: what the client calls that has blocks run otherwise than in a step.

    ``leaves_ended_out``: whether steps are no concern of blocks that have ended, as soon as they have. If not,
    ``left``: the requests of whose blocks all processes know, since this step began, that they have ended, and
    ``together``: the runs that each stand for many, for which it is told now.
    """

    windowed: frozenset[str] = frozenset({"insitu_collect"})
    leaves_ended_out = True
    left: Sequence[str] = ()
    together: News = MappingProxyType({})

    def window(self) -> AbstractContextManager[Any]:
        """To be open while blocks run otherwise than in a step."""
        return nullcontext()

    def idle(self) -> None:
        """Instead of ``begin``, in a step without runs."""

    def over(self) -> None:
        """To be called when the sampled ids of a step have been served, and what may be wrong with them told."""
