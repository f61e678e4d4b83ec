"""Short reviews, good and bad, for trying steering and probes out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Reviews:
    """Texts with labels: 1 good, 0 bad. No text occurs in both parts."""

    train: list[str]
    train_labels: list[int]
    test: list[str]
    test_labels: list[int]

    def of(self, label: int) -> list[str]:
        """The texts of ``train`` with this label."""
        return [text for text, mine in zip(self.train, self.train_labels, strict=True) if mine == label]


def reviews() -> Reviews:
    """64 sentences written for this library, half of them good; every fourth is kept for testing."""
    lines = files("insitu.recipes").joinpath("sentiment.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    train = [row for number, row in enumerate(rows) if number % 8 < 6]
    test = [row for number, row in enumerate(rows) if number % 8 >= 6]
    return Reviews(
        [row["text"] for row in train],
        [row["label"] for row in train],
        [row["text"] for row in test],
        [row["label"] for row in test],
    )
