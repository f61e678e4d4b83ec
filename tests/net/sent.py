"""A trace that sends its block: encoded, decoded, and what arrives kept."""

from __future__ import annotations

from typing import Any

from insitu.block import Block, CapturedBody, Site
from insitu.net import Named, TraceBuilder, TraceRequest, decode_frame, encode_frame


class Sent(CapturedBody):
    """``request`` is what arrived; ``captured`` the block as it was captured here."""

    request: TraceRequest
    captured: Block

    def target(self) -> Any:
        return self

    def run_block(self, site: Site) -> BaseException | None:
        self.captured = site.block
        builder = TraceBuilder(self.name_of)
        builder.add("prompt", site.block, site.scope.values(site.block.reads), {"max_tokens": 1})
        self.request = sent(builder)
        return None

    def name_of(self, value: Any) -> Named | None:
        return Named("tracer") if value is self else None


def sent(builder: TraceBuilder) -> TraceRequest:
    """The request as it arrives."""
    return TraceRequest.of_frame(decode_frame(encode_frame(builder.request().frame())))
