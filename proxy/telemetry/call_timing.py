"""How long the parts of one call took. Seconds; None where there was no such part."""

from __future__ import annotations

from typing import NamedTuple, Self

from ratchet.store.records import CallEnded


class CallTiming(NamedTuple):
    """`overhead` is the proxy's part, of a stream up to its head; `inter_token` the mean after the first token."""

    total: float
    first_byte: float | None
    inter_token: float | None
    overhead: float | None

    @classmethod
    def of(cls, record: CallEnded, total: float, overhead: float | None) -> Self:
        """Return the timing of an ended call whose client had its last byte after `total` seconds."""
        if record.first_byte_at is None:
            return cls(total, None, None, overhead)
        first = max(0.0, record.first_byte_at - record.begun.started_at)
        # Choices grow at the same time: the steps of the stream are the tokens of one of them.
        steps = record.completion_tokens // max(1, len(record.choices)) - 1
        inter = max(0.0, record.ended_at - record.first_byte_at) / steps if steps > 0 else None
        return cls(total, first, inter, overhead)
