"""Keys: who may do what."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from insitu import ArgumentError
from insitu.net import KeyLimits, Keys, Permission

SECRET = "a-long-secret"


def load(tmp_path: Path, data: Any) -> Keys:
    file = tmp_path / "keys.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return Keys.load(file)


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"other-secret").hexdigest()
    keys = load(
        tmp_path,
        [
            {"name": "ann", "key": SECRET, "permission": "form", "limits": {"traces": 4, "seconds": 0.5}},
            {"name": "bob", "sha256": digest, "permission": "trusted", "edits": True},
            {"name": "cat", "key": "third-secret"},
        ],
    )
    ann, bob, cat = keys.find(SECRET), keys.find("other-secret"), keys.find("third-secret")
    assert ann is not None
    assert bob is not None
    assert cat is not None
    assert (ann.name, ann.permission, ann.edits) == ("ann", Permission.FORM, False)
    assert ann.limits == KeyLimits(seconds=0.5, traces=4)
    assert (bob.permission, bob.edits, cat.permission) == (Permission.TRUSTED, True, Permission.BLOCKS)
    assert ann.permission < cat.permission < bob.permission
    assert SECRET not in repr(ann)
    for wrong in ("", SECRET + "x", SECRET[:-1], digest, "\ud800"):
        assert keys.find(wrong) is None


def test_keys_of_the_command_line() -> None:
    keys = Keys.of_texts([SECRET], Permission.TRUSTED)
    found = keys.find(SECRET)
    assert found is not None
    assert found.permission is Permission.TRUSTED
    with pytest.raises(ArgumentError, match="at least 8 characters"):
        Keys.of_texts(["short"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "can't be read"),
        ({}, "is a list"),
        ([1], "key 0 .* is an object with a name"),
        ([{"name": "", "key": SECRET}], "key 0 .* is an object with a name"),
        ([{"name": "a"}], "either key or sha256"),
        ([{"name": "a", "key": SECRET, "sha256": "0" * 64}], "either key or sha256"),
        ([{"name": "a", "key": "short"}], "at least 8 characters"),
        ([{"name": "a", "sha256": "xyz"}], "64 hexadecimal digits"),
        ([{"name": "a", "key": SECRET, "permission": "root"}], "it is form, blocks, trusted"),
        ([{"name": "a", "key": SECRET, "edits": 1}], "true or false"),
        ([{"name": "a", "key": SECRET, "more": 1}], "has 'more', which is none of"),
        ([{"name": "a", "key": SECRET, "limits": {"gold": 1}}], "has the limit 'gold'"),
        ([{"name": "a", "key": SECRET, "limits": {"traces": 0}}], "a number above 0"),
        ([{"name": "a", "key": SECRET, "limits": {"traces": True}}], "a number above 0"),
        ([{"name": "a", "key": SECRET}, {"name": "a", "key": SECRET + "x"}], "two keys have the name 'a'"),
    ],
)
def test_what_is_no_key_is_said(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(tmp_path, data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"name": "a", "key": "abcdefgh"}, {"name": "b", "key": "abcdefgh"}]', "'a' and 'b' are the same key"),
        ('[{"name": "a", "key": "abcdefgh", "permission": "form", "permission": "trusted"}]', "comes twice"),
        ("[" * 100_000, "can't be read"),
        ('[{"name": "a", "key": "abcdefgh", "limits": {"seconds": NaN}}]', "above 0"),
    ],
)
def test_a_file_that_can_be_read_in_two_ways_is_refused(text: str, message: str, tmp_path: Any) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        Keys.load(tmp_path / "keys.json")
