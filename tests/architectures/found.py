"""What the tests measured, for the table of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOUND = Path(__file__).resolve().parent.parent.parent / "build" / "architectures.json"


def write_down(name: str, measured: dict[str, Any]) -> None:
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    found[name] = {**found.get(name, {}), **measured}
    FOUND.parent.mkdir(exist_ok=True)
    FOUND.write_text(json.dumps(found, indent=1))
