"""Which tests stay together where several processes run them: those of a file, and those of an architecture."""

from __future__ import annotations

import re

from xdist.scheduler import LoadFileScheduling

from tests.architectures.configs import ARCHITECTURES


class Scheduling(LoadFileScheduling):
    """An architecture's engine is used by tests in several files, and is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if "tests/architectures/" not in file:
            return file
        names = set(re.split(r"[\[\]-]", nodeid)) & ARCHITECTURES.keys()
        return f"{file.rpartition('/')[0]}/{names.pop()}" if len(names) == 1 else file
