"""The tree of a model as a notebook shows it."""

from __future__ import annotations

from html.parser import HTMLParser

from insitu.tree import Module, Outline, outline_html

OUTLINE = Outline(
    {
        "": Module("Model", ("layers", "head")),
        "layers": Module("ModuleList", ("0", "1", "2")),
        **{f"layers.{number}": Module("Layer", ("mlp",)) for number in range(3)},
        **{f"layers.{number}.mlp": Module("MLP<&>", (), "8 -> 32") for number in range(3)},
        "head": Module("Head", (), "8 -> 100"),
    }
)


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_equal_neighbours_are_one_entry_and_text_is_escaped() -> None:
    page = outline_html(OUTLINE)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<details") == 3
    assert page.count("MLP&lt;&amp;&gt;") == 1
    assert "<b>0-2</b> Layer" in page
    assert 'title="layers.0.mlp"' in page
    assert "<i>8 -&gt; 100</i>" in page


def test_the_first_two_levels_are_open() -> None:
    assert outline_html(OUTLINE).count("<details open>") == 2
