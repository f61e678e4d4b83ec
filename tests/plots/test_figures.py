"""Heat maps, attention patterns, strips and curves: any size and any token can be drawn, and what can't is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.plots import attention_png, curves_png, heat_map_png, token_strip_png
from tests.plots.test_lens import ODD, png_size

TOKENS = ODD + [f" word{number}" for number in range(90)]


@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_heat_map_of_any_width(tmp_path: Path, count: int) -> None:
    values = [[(row - column) / 50 for column in range(count)] for row in range(30)]
    heat_map_png(tmp_path / "a.png", values, rows=list(map(str, range(30))), columns=TOKENS[:count], title="effect")
    across, up = png_size(tmp_path / "a.png")
    assert across >= max(300, 20 * count)
    assert up > 500


@pytest.mark.parametrize("count", [1, 10, 100])
def test_attention_with_any_number_of_tokens(tmp_path: Path, count: int) -> None:
    pattern = [[1 / (query + 1) * (key <= query) for key in range(count)] for query in range(count)]
    attention_png(tmp_path / "a.png", TOKENS[:count], [pattern] * 6, [f"0.{head}" for head in range(6)])
    across, up = png_size(tmp_path / "a.png")
    assert across > up > 600


def test_one_query_of_a_decode_step_stands_at_the_last_token(tmp_path: Path) -> None:
    attention_png(tmp_path / "a.png", TOKENS[:10], [[[0.1] * 10]], ["0.0"])
    assert png_size(tmp_path / "a.png")[0] > 200


@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_strip_of_tokens(tmp_path: Path, count: int) -> None:
    token_strip_png(tmp_path / "a.png", TOKENS[:count], [number - 5 for number in range(count)], split=min(count, 4))
    assert png_size(tmp_path / "a.png")[0] > 1000


def test_curves_by_layer_and_by_place(tmp_path: Path) -> None:
    curves_png(tmp_path / "a.png", {"one": list(range(80)), "other": [0.5] * 80}, title="by layer")
    curves_png(tmp_path / "b.png", {"drop": [1.0, -1.0]}, labels=["attn_out[0]", "mlp_out[0]"])
    assert png_size(tmp_path / "a.png")[0] == png_size(tmp_path / "b.png")[0]


def test_sizes_that_do_not_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 rows of 2"):
        heat_map_png(tmp_path / "a.png", [[1.0]], rows=["0"], columns=["a", "b"])
    with pytest.raises(ValueError, match="title for each pattern"):
        attention_png(tmp_path / "a.png", ["a"], [[[1.0]]], [])
    with pytest.raises(ValueError, match="score for each token"):
        token_strip_png(tmp_path / "a.png", ["a", "b"], [1.0])
    with pytest.raises(ValueError, match="one length"):
        curves_png(tmp_path / "a.png", {"a": [1.0], "b": [1.0, 2.0]})
    assert not list(tmp_path.iterdir())
