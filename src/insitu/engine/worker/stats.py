"""What a worker has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counts since the engine started. ``eager_steps``: a block waited for a module without a tap;
    ``tapped_steps``: all that waited for modules were served at taps; ``plain_steps``: none waited for one,
    so the step ran as vLLM would run it. A tapped step that had to be run again eagerly counts as both.
    ``tap_bytes``: what the taps hold on the device. ``blocks_together``: beside so many requests the block ran once
    for all those that began in the same step; ``blocks_alone``: beside so many it ran by itself. ``block_seconds``:
    for how long blocks ran, waiting left out. ``promised_visits``: so many times a block that ran by itself came to a
    tapped place and went on without waiting, since it was served from the graph afterwards; ``table_edits``: so many
    rows of requests were edited at a place by a table in a graph."""

    eager_steps: int = 0
    plain_steps: int = 0
    tapped_steps: int = 0
    tap_bytes: int = 0
    blocks_together: int = 0
    blocks_alone: int = 0
    block_seconds: float = 0.0
    promised_visits: int = 0
    table_edits: int = 0
