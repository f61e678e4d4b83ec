"""What is a form, and what is said of what is none. What forms do is in tests/engine/test_form.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import insitu.net.form
from insitu.net import Failed, decode_event, encode_event
from insitu.net.errors import FormError
from insitu.net.form import Read, order, parsed, schema

SCHEMA = json.loads((Path(insitu.net.form.__file__).parent / "form.schema.json").read_text())
GOOD: list[dict[str, Any]] = [
    {"do": "read", "at": "resid_post[6]", "as": "h"},
    {"do": "read", "at": "logits", "as": "h", "positions": "last", "when": "all"},
    {"do": "read", "at": "model.layers.6.mlp.output", "as": "h", "positions": [0, -1]},
    {"do": "read", "at": "model.layers.6.output[0]", "as": "h", "positions": {"text": "Eiffel", "occurrence": -1}},
    {"do": "add", "at": "resid_post[-1]", "vector": [1, 2.5], "scale": -4, "match_norm": True, "when": [0, 2, 5]},
    {"do": "set", "at": "q[1]", "vector": [0, 0], "when": 3},
    {"do": "project_out", "at": "embed", "vector": [1, 0], "when": "generated"},
    {"do": "scale", "at": "final_norm", "scale": 0},
]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"do": "read", "at": "resid_post[6]"}, "invalid", ""),
    ({"do": "read", "at": "resid_post[6]", "as": "a b"}, "invalid", ".as"),
    ({"do": "read", "at": "resid_post[6]", "as": "h", "vector": [1]}, "unknown-key", ""),
    ({"do": "read", "at": "resid_post", "as": "h"}, "unknown-place", ".at"),
    ({"do": "read", "at": "embed[1]", "as": "h"}, "unknown-place", ".at"),
    ({"do": "read", "at": "os.system('id')", "as": "h"}, "unknown-place", ".at"),
    ({"do": "read", "at": "model.__class__.output", "as": "h"}, "unknown-place", ".at"),
    ({"do": "read", "at": "logits", "as": "h", "when": "later"}, "invalid", ".when"),
    ({"do": "read", "at": "logits", "as": "h", "when": -1}, "invalid", ".when"),
    ({"do": "read", "at": "logits", "as": "h", "when": [2, 1]}, "invalid", ".when"),
    ({"do": "read", "at": "logits", "as": "h", "when": True}, "invalid", ".when"),
    ({"do": "read", "at": "logits", "as": "h", "positions": []}, "invalid", ".positions"),
    ({"do": "read", "at": "logits", "as": "h", "positions": [1.5]}, "invalid", ".positions[0]"),
    ({"do": "read", "at": "logits", "as": "h", "positions": [1], "when": "all"}, "bad-positions", ".positions"),
    ({"do": "read", "at": "logits", "as": "h", "positions": {"text": "x", "n": 1}}, "unknown-key", ".positions"),
    ({"do": "read", "at": "attn_pattern[1]", "as": "h", "when": "all"}, "not-supported", ".at"),
    ({"do": "scale", "at": "attn_pattern[1]", "scale": 2}, "not-writable", ".at"),
    ({"do": "add", "at": "embed", "vector": []}, "invalid", ".vector"),
    ({"do": "add", "at": "embed", "vector": ["1"]}, "invalid", ".vector[0]"),
    ({"do": "add", "at": "embed", "vector": [float("inf")]}, "bad-vector", ".vector"),
    ({"do": "add", "at": "embed", "vector": [3.5e38]}, "bad-vector", ".vector"),
    ({"do": "set", "at": "embed", "vector": [1], "scale": -3.5e38}, "invalid", ".scale"),
    ({"do": "add", "at": "embed", "vector": [0], "match_norm": True}, "bad-vector", ".vector"),
    ({"do": "project_out", "at": "embed", "vector": [0]}, "bad-vector", ".vector"),
    ({"do": "project_out", "at": "embed", "vector": [1], "match_norm": True}, "unknown-key", ""),
    ({"do": "scale", "at": "embed", "scale": float("nan")}, "invalid", ".scale"),
    ({"do": "scale", "at": "embed", "scale": "2"}, "invalid", ".scale"),
    ({"do": "run", "at": "embed", "code": "1"}, "invalid", ".do"),
    ({"at": "embed"}, "invalid", ""),
]


def test_the_schema_that_is_shipped_is_that_of_the_code() -> None:
    assert {key: value for key, value in SCHEMA.items() if key not in ("$schema", "title")} == schema()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("action", GOOD, ids=lambda action: action["do"] + " " + action["at"])
def test_a_form_is_taken_by_the_code_and_by_the_schema(action: dict[str, Any]) -> None:
    form = {"actions": [action]}
    jsonschema.validate(form, SCHEMA)
    assert len(parsed(json.dumps(form)).actions) == len(parsed(form).actions) == 1


@pytest.mark.parametrize(("action", "code", "path"), BAD, ids=lambda part: str(part)[:60])
def test_what_is_wrong_is_said_by_code_and_path(action: dict[str, Any], code: str, path: str) -> None:
    with pytest.raises(FormError) as caught:
        parsed({"actions": [action]})
    assert (caught.value.code, caught.value.path) == (code, f"$.actions[0]{path}")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "malformed"),
        (b"[1]", "invalid"),
        (b"{}", "invalid"),
        (b'{"actions": []}', "invalid"),
        (b'{"actions": [], "more": 1}', "invalid"),
        (b"[" * 100_000, "invalid"),
        (b"\xff", "malformed"),
    ],
)
def test_what_is_no_form_at_all(data: bytes, code: str) -> None:
    with pytest.raises(FormError) as caught:
        parsed(data)
    assert caught.value.code == code


def test_a_name_is_read_once() -> None:
    with pytest.raises(FormError, match=r"two reads have the name 'h' \(at \$\.actions\[1\]\.as\)"):
        parsed({"actions": [GOOD[0], GOOD[1]]})


def test_standard_names_are_done_in_the_order_of_the_forward() -> None:
    places = ["logits", "resid_post[1]", "attn_out[1]", "embed", "final_norm", "resid_post[0]", "q[1]", "resid_post[1]"]
    actions = [Read(at=place, name=f"r{number}") for number, place in enumerate(places)]
    assert [places[number] for number in order(actions)] == [
        "embed",
        "resid_post[0]",
        "q[1]",
        "attn_out[1]",
        "resid_post[1]",
        "resid_post[1]",
        "final_norm",
        "logits",
    ]
    assert order(actions)[4:6] == [1, 7]
    actions.append(Read(at="model.layers.0.output", name="m"))
    assert order(actions) == list(range(9))


def test_an_error_travels_with_its_code() -> None:
    with pytest.raises(FormError) as caught:
        parsed({"actions": [BAD[3][0]]})
    found = decode_event(encode_event(Failed(caught.value)))
    assert isinstance(found, Failed)
    assert type(found.error) is FormError
    assert found.error.code == "unknown-place"
