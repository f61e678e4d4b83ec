"""Whitespace is seen, and cutting counts columns rather than characters."""

from __future__ import annotations

import pytest

from insitu.plots.tokens import shorten, visible, width


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" Paris", "·Paris"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("a\u00a0b", "a\\xa0b"),
        ("\u200b", "\\u200b"),
        ("", "∅"),
        ("naïve 東京", "naïve·東京"),
    ],
)
def test_visible(token: str, shown: str) -> None:
    assert visible(token) == shown


def test_shorten_counts_columns() -> None:
    assert shorten("hello", 5) == "hello"
    assert shorten("hello!", 5) == "hell…"
    assert shorten("東京都庁", 6) == "東京…"
    assert width(shorten("東京都庁", 6)) <= 6
    assert width("e\u0301") == 1
