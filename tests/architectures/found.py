"""What the tests measured, for the table of the documentation."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

FOUND = Path(__file__).resolve().parent.parent.parent / "build" / "architectures.json"


def write_down(name: str, measured: dict[str, Any]) -> None:
    FOUND.parent.mkdir(exist_ok=True)
    with FOUND.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        file.seek(0)
        found = json.loads(file.read() or "{}")
        found[name] = {**found.get(name, {}), **measured}
        file.truncate(0)
        file.write(json.dumps(found, indent=1))
