"""What the pages want of mkdocs beside its plugins."""

from __future__ import annotations

import re


def on_page_content(html: str, **_) -> str:
    """In docstrings a paragraph that ends in two colons has code after it; Markdown shows both colons."""
    return re.sub(r"::</p>", ":</p>", html)
