"""Tokens as a person can read them."""

from __future__ import annotations

import unicodedata

MARKS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(token: str) -> str:
    """The token with its whitespace and control characters shown: `" a\\n"` becomes `"·a↵"`."""
    return "".join(_visible_character(character) for character in token) or "∅"


def width(text: str) -> int:
    """How many columns the text takes: East Asian wide characters count twice, combining ones not at all."""
    return sum(_columns(character) for character in text)


def shorten(text: str, columns: int) -> str:
    """The text cut to at most `columns` columns, ending in `…` where something was cut."""
    if width(text) <= columns:
        return text
    kept, used = "", 0
    for character in text:
        used += _columns(character)
        if used > columns - 1:
            break
        kept += character
    return kept + "…"


def _visible_character(character: str) -> str:
    if character in MARKS:
        return MARKS[character]
    if unicodedata.category(character) in {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp", "Zs"}:
        return escaped(character)
    return character


def escaped(character: str) -> str:
    """A character by its number, as Python writes it."""
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
