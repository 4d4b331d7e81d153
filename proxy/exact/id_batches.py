"""Reads the ids of a generate stream ahead in a background task, and merges events between two reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError
from ratchet.proxy.exact.scale_out import Generated, GeneratedChoice, generated_decoder
from ratchet.proxy.wire.upstream_response import DONE, SseParser, UpstreamResponse

_MAX_BUFFERED_EVENTS = 4096

_encode = msgspec.json.Encoder().encode


class _RawLogprobs(msgspec.Struct):
    content: list[Raw] | None = None


_logprobs = msgspec.json.Decoder(_RawLogprobs | None)


@dataclass(slots=True)
class IdBatch:
    """What arrived since the last batch: one piece per choice, in the order of their first ids."""

    since: float  # arrival of the earliest event, monotonic seconds
    pieces: list[GeneratedChoice] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    usage: Raw | None = None
    error: Raw | None = None
    last: bool = False


class IdBatches:
    """The events of one generate stream."""

    def __init__(self, ids: UpstreamResponse) -> None:
        self._ids = ids
        self._events: asyncio.Queue[tuple[float, Generated | UpstreamError | None]] = asyncio.Queue(
            _MAX_BUFFERED_EVENTS
        )
        self._failed: UpstreamError | None = None
        self._ended = asyncio.Event()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def next_batch(self) -> IdBatch:
        """Wait for the next ids and return all that have arrived. Raises UpstreamError after all earlier ids."""
        if self._failed:
            raise self._failed
        since, event = await self._events.get()
        batch, events = IdBatch(since), [event]
        while not self._events.empty():
            events.append(self._events.get_nowait()[1])
        pieces: dict[int, list[GeneratedChoice]] = {}
        for event in events:
            if event is None:
                batch.last = True
            elif isinstance(event, UpstreamError):
                self._failed = event
            else:
                _add(batch, pieces, event)
        batch.pieces = [_merged(parts) for parts in pieces.values()]
        if self._failed and len(events) == 1:
            raise self._failed
        return batch

    async def gather(self, seconds: float) -> None:
        """Wait `seconds` for more ids, or until the stream ends."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    def close(self) -> None:
        """Stop reading."""
        self._reader.cancel()

    async def _read(self) -> None:
        events = SseParser()
        end: UpstreamError | None = UpstreamDisconnected("ended its stream without [DONE]", url=self._ids.url)
        try:
            async for piece in self._ids.pieces():
                now = time.perf_counter()
                for data, _ in events.feed(piece):
                    if data == DONE:
                        end = None
                    elif data is not None:
                        await self._events.put((now, generated_decoder.decode(data)))
        except UpstreamError as error:
            end = error
        except msgspec.DecodeError as error:
            end = UpstreamDisconnected(f"sent an event that cannot be read: {error}", url=self._ids.url)
        await self._events.put((time.perf_counter(), end))
        self._ended.set()


def _add(batch: IdBatch, pieces: dict[int, list[GeneratedChoice]], event: Generated) -> None:
    if bytes(event.error):
        batch.error = event.error
        return
    batch.prompt_token_ids = batch.prompt_token_ids or event.prompt_token_ids
    if bytes(event.usage) != b"null":
        batch.usage = event.usage
    for piece in event.choices:
        pieces.setdefault(piece.index, []).append(piece)


def _merged(parts: Sequence[GeneratedChoice]) -> GeneratedChoice:
    """Return consecutive pieces of one choice as one piece."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts if (decoded := _logprobs.decode(part.logprobs)) for row in decoded.content or ()]
    return GeneratedChoice(
        index=parts[-1].index,
        token_ids=[token for part in parts for token in part.token_ids or ()],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        logprobs=Raw(_encode({"content": rows})) if rows else Raw(b"null"),
    )
