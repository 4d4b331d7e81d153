"""Generated ids as the stream of events that vLLM itself would have answered.

One derender call is under way at a time, and none for a while after it; what is generated meanwhile is merged into the
next one. Every call replays all that came before, in the process that serves vLLM's API: the more streams there are,
the longer each waits, so that derender takes about a quarter of that process's time at most. A stream whose ids or
words break off raises; nothing ends in silence.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.exact import derender_fixes
from ratchet.proxy.exact.id_batches import IdBatch, IdBatches
from ratchet.proxy.exact.scale_out import GeneratedChoice, ScaleOut, ScaleOutError, piece_body
from ratchet.proxy.exact.whole_response import DerenderRequest
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.wire.upstream_response import UpstreamResponse

_encode = msgspec.json.Encoder().encode
_SHARE = 3.0  # of a replica's time, parts without derender to one with it
_LONGEST_PAUSE = 2.0  # seconds
_END = b"data: [DONE]\n\n"

Json = dict[str, Any]


class StreamPacer:
    """How often the streams of one replica ask derender: together for about a quarter of the time."""

    def __init__(self) -> None:
        self.streams = 0

    def pause(self, spent: float) -> float:
        """Return how long a stream waits after a call that took `spent` seconds."""
        return min(_SHARE * spent * self.streams, _LONGEST_PAUSE)


class _Choice:
    """One choice as far as it is worded."""

    __slots__ = ("repair", "state")

    def __init__(self, wanted: DerenderRequest) -> None:
        self.repair = derender_fixes.DerenderStreamFixer(wanted.stops, wanted.tool_choice)
        self.state: Raw | None = None


class StreamedResponse:
    """A chat completion as its ids come. `ids` is the answer of generate, and closes with this one."""

    status = 200

    def __init__(
        self, scale_out: ScaleOut, ids: UpstreamResponse, wanted: DerenderRequest, pacer: StreamPacer, metrics: Metrics
    ) -> None:
        self.url = ids.url
        self.headers: Mapping[str, str] = {}
        self._scale_out = scale_out
        self._ids = ids
        self._wanted = wanted
        self._metrics = metrics
        self._head = wanted.head("chat.completion.chunk")
        self._choices: dict[int, _Choice] = {}
        self._pacer = pacer
        self._pacer.streams += 1
        self._arrivals = IdBatches(ids)
        self._first = b""
        self._over = False
        self._closed = False
        self._spent = 0.0  # seconds of the last derender call

    async def wait_for_body(self) -> None:
        """Wait for the first words; until they are here, the call can still be answered otherwise.

        Raises UpstreamError.
        """
        batch = await self._arrivals.take()
        opening: list[bytes] = []
        if batch.error is None:
            self._wanted.check_prompt(batch.prompt_token_ids)
            opening = [
                self._event([derender_fixes.make_first_delta(index)], prompt_token_ids=batch.prompt_token_ids)
                for index in range(self._wanted.count)
            ]
        self._first = b"".join(opening) + await self._worded(batch)

    async def read(self) -> bytes:
        """Return all events. Raises UpstreamError."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the events as they come. Raises UpstreamError."""
        first, self._first = self._first, b""
        if first:
            yield first
        while not self._over:
            await self._arrivals.gather(self._pacer.pause(self._spent))
            if events := await self._worded(await self._arrivals.take()):
                yield events

    def close(self) -> None:
        """Stop reading; where ids are still to come, vLLM notices at once."""
        if not self._closed:
            self._closed = True
            self._pacer.streams -= 1
        self._arrivals.close()
        self._ids.close()

    async def _worded(self, batch: IdBatch) -> bytes:
        began = time.perf_counter()
        out = [await self._piece(piece) for piece in batch.pieces]
        self._spent = time.perf_counter() - began
        if batch.error is not None:
            out.append(b"data: " + _encode({"error": batch.error}) + b"\n\n")
        if batch.usage is not None:
            out.append(self._event([], usage=batch.usage))
        if batch.last:
            out.append(_END)
            self._over = True
        self._metrics.exact_lag_seconds.observe(time.perf_counter() - batch.since)
        return b"".join(out)

    async def _piece(self, piece: GeneratedChoice) -> bytes:
        wanted = self._wanted
        choice = self._choices.setdefault(piece.index, _Choice(wanted))
        body = piece_body(
            wanted.model, wanted.request, wanted.rendered, derender_fixes.strip_turn_end(piece), choice.state
        )
        told = await self._scale_out.delta(self.url, body)
        choice.state = told.stream_state
        try:
            delta = choice.repair.delta(told.chunk["choices"][0]["delta"], piece)
        except (KeyError, IndexError, TypeError) as error:
            raise ScaleOutError(f"derender's event has no {error}") from error
        worded = {
            "index": piece.index,
            "delta": delta,
            "logprobs": wanted.logprobs(piece.logprobs),
            "finish_reason": choice.repair.finish(piece),
            "token_ids": piece.token_ids,
        }
        if piece.finish_reason is not None:
            worded["stop_reason"] = piece.stop_reason
        return self._event([worded])

    def _event(self, choices: Sequence[Json], **members: Any) -> bytes:
        return b"data: " + _encode({**self._head, "choices": choices, **members}) + b"\n\n"
