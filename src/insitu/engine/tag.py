"""What a request carries of its blocks, in the ``extra_args`` of its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "insitu"
ASKED = "insitu_edits"
"""Where a plain request names the edits that it wants, as ``edits=[...]`` does for a traced one."""


@dataclass(frozen=True)
class Tag:
    """``job``: that of its own block, if it is traced. ``edits``: the numbers of the installed edits that run
    beside it, in order; what they leave is asked for by ``group``, which all sequences of a request share.
    ``whole``: whether its blocks must see its prompt whole, and can't be run a second time. ``refusal``: why the
    request can't run. ``tenant``: at a server, whose it is: whose edits run beside it, with those for everybody."""

    job: str | None = None
    group: str = ""
    edits: tuple[int, ...] = ()
    whole: bool = True
    refusal: str = ""
    tenant: str = ""

    def put_on(self, params: Any) -> None:
        """Into the ``extra_args`` of sampling parameters, which travel as plain data."""
        params.extra_args = {**(params.extra_args or {}), _KEY: {**vars(self), "edits": list(self.edits)}}


def without_tag(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """``extra_args`` as a client may give them."""
    return {name: value for name, value in (extra or {}).items() if name != _KEY}


def tag_of(sampling_params: Any) -> Tag | None:
    """The tag of a request, if it has one."""
    found = _found(sampling_params)
    return Tag(**{**found, "edits": tuple(found["edits"])}) if found else None


def has_tag(sampling_params: Any) -> bool:
    """Whether blocks run beside a request, or it is refused."""
    return _found(sampling_params) is not None


def is_whole(sampling_params: Any) -> bool:
    """Whether a request has blocks that must see its prompt whole."""
    return bool((found := _found(sampling_params)) and found["whole"])


def _found(sampling_params: Any) -> Mapping[str, Any] | None:
    extra = getattr(sampling_params, "extra_args", None)
    found = extra.get(_KEY) if extra else None
    return found if type(found) is dict or isinstance(found, Mapping) else None
