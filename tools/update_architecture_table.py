"""Writes the table of docs/architectures.md from build/architectures.json, which tests/architectures writes."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "build" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- table: make test writes it down, tools/update_architecture_table.py puts it here -->", "<!-- end -->"
HEAD = ["architecture", "model class", "layers tested", "largest difference", "q, k, v", "attn_pattern"]
HEAD += ["resid_mid", "router_logits", "note"]


def table(found: dict[str, dict]) -> str:
    rows = [HEAD, ["---"] * len(HEAD)]
    for name in sorted(found):
        entry = found[name]
        yes = {True: "yes", False: "no"}
        measured = [entry[name] for name in ("largest difference", "q, k, v", "attn_pattern")]
        largest = ["" if value is None else f"{value:.1e}" for value in measured]
        has = [yes[entry["resid_mid"]], yes[entry["router_logits"]]]
        rows.append([name, f"`{entry['model class']}`", str(entry["layers"]), *largest, *has, entry["note"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    found = json.loads(FOUND.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}", "utf-8")
    print(f"{PAGE.name}: {len(found)} architectures")


if __name__ == "__main__":
    main()
