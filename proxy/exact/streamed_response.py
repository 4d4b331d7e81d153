"""Generated ids as the event stream that vLLM's plain chat would have sent.

One derender call is open at a time, followed by a pause; ids generated meanwhile are merged into the next call. Every
call replays all ids before it, in the process that serves vLLM's API. So the pause grows with the number of streams,
and derender uses at most about a quarter of that process's time. A stream that breaks off raises an error.
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
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.wire.upstream_response import UpstreamResponse

_encode = msgspec.json.Encoder().encode
_PAUSE_FACTOR = 3.0  # pause as a multiple of the time that a derender call took
_MAX_PAUSE = 2.0  # seconds
_END = b"data: [DONE]\n\n"

Json = dict[str, Any]


class StreamPacer:
    """Limits the derender calls of one replica's streams to about a quarter of the time in total."""

    def __init__(self) -> None:
        self.streams = 0

    def pause(self, spent: float) -> float:
        """Return the pause after a call that took `spent` seconds."""
        return min(_PAUSE_FACTOR * spent * self.streams, _MAX_PAUSE)


class _Choice:
    """The derender state of one choice."""

    __slots__ = ("fixer", "state")

    def __init__(self, request: DerenderRequest) -> None:
        self.fixer = derender_fixes.DerenderStreamFixer(request.stops, request.tool_choice)
        self.state: Raw | None = None


class StreamedResponse:
    """A chat completion as its ids arrive. `ids` is the response of generate; it closes with this one."""

    status = 200

    def __init__(
        self,
        scale_out: ScaleOut,
        ids: UpstreamResponse,
        request: DerenderRequest,
        pacer: StreamPacer,
        metrics: ProxyMetrics,
    ) -> None:
        self.url = ids.url
        self.headers: Mapping[str, str] = {}
        self._scale_out = scale_out
        self._ids = ids
        self._request = request
        self._metrics = metrics
        self._head = request.head("chat.completion.chunk")
        self._choices: dict[int, _Choice] = {}
        self._pacer = pacer
        self._pacer.streams += 1
        self._batches = IdBatches(ids)
        self._first = b""
        self._over = False
        self._closed = False
        self._spent = 0.0  # seconds of the last derender call

    async def wait_for_body(self) -> None:
        """Wait for the first text; until then the call can still fall back to plain chat. Raises UpstreamError."""
        batch = await self._batches.next_batch()
        opening: list[bytes] = []
        if batch.error is None:
            self._request.check_prompt(batch.prompt_token_ids)
            opening = [
                self._event([derender_fixes.make_first_delta(index)], prompt_token_ids=batch.prompt_token_ids)
                for index in range(self._request.count)
            ]
        self._first = b"".join(opening) + await self._derender(batch)

    async def read(self) -> bytes:
        """Return all events. Raises UpstreamError."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the events as they arrive. Raises UpstreamError."""
        first, self._first = self._first, b""
        if first:
            yield first
        while not self._over:
            await self._batches.gather(self._pacer.pause(self._spent))
            if events := await self._derender(await self._batches.next_batch()):
                yield events

    def close(self) -> None:
        """Stop reading; an unfinished generation is aborted at once."""
        if not self._closed:
            self._closed = True
            self._pacer.streams -= 1
        self._batches.close()
        self._ids.close()

    async def _derender(self, batch: IdBatch) -> bytes:
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
        request = self._request
        choice = self._choices.setdefault(piece.index, _Choice(request))
        body = piece_body(
            request.model, request.request, request.rendered, derender_fixes.strip_turn_end(piece), choice.state
        )
        derendered = await self._scale_out.delta(self.url, body)
        choice.state = derendered.stream_state
        try:
            delta = choice.fixer.delta(derendered.chunk["choices"][0]["delta"], piece)
        except (KeyError, IndexError, TypeError) as error:
            raise ScaleOutError(f"derender's chunk has no {error}") from error
        event = {
            "index": piece.index,
            "delta": delta,
            "logprobs": request.logprobs(piece.logprobs),
            "finish_reason": choice.fixer.finish(piece),
            "token_ids": piece.token_ids,
        }
        if piece.finish_reason is not None:
            event["stop_reason"] = piece.stop_reason
        return self._event([event])

    def _event(self, choices: Sequence[Json], **members: Any) -> bytes:
        return b"data: " + _encode({**self._head, "choices": choices, **members}) + b"\n\n"
