"""Limits per key: requests and tokens a minute, as token buckets that hold one minute's worth.

A request is counted when it arrives. Tokens are reserved then too, by an estimate (the body's length, and the longest
answer that is asked for, within the model's context), and settled at the end with what was really used. A call that
is larger than a minute's tokens waits for a full bucket, and leaves a debt where it really used more. Over a limit the
call gets 429 in its dialect's shape and is told when to come back; nothing of it is recorded or forwarded.

Promises: a key without limits costs nothing here; memory is two numbers per key that has limits; what was only
estimated, and what a client left behind, never costs a key more than one full bucket. Does not share: each
proxy process counts what comes through itself. Time is a parameter of the buckets; all belongs to the loop's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.errors import RateLimited
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.asgi import Headers

TOKEN_RESERVATION = "ratchet.hold"  # where the scope has the Hold of a call whose key has limits

_BYTES_PER_TOKEN = 4
_USUAL_ANSWER = 512  # tokens, where the client sets no limit
_MINUTE = 60.0


class Bucket:
    """So much a minute, and no more than a minute's worth at once."""

    __slots__ = ("_at", "level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)  # below 0 while a debt stands
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """Take an amount, a full bucket at most, and return 0.0; where there is less, the seconds to wait for it."""
        self._fill(now)
        wanted = min(amount, self.limit)
        if self.level < wanted:
            return (wanted - self.level) * _MINUTE / self.limit
        self.level -= wanted
        return 0.0

    def give(self, amount: int, now: float) -> None:
        """Give back what was not used; a negative amount takes more, into debt if need be."""
        self._fill(now)
        self.level = min(float(self.limit), self.level + amount)

    def full_in(self, now: float) -> float:
        """Return the seconds until the bucket is full again."""
        self._fill(now)
        return (self.limit - self.level) * _MINUTE / self.limit

    def _fill(self, now: float) -> None:
        self.level = min(float(self.limit), self.level + max(0.0, now - self._at) * self.limit / _MINUTE)
        self._at = now


class KeyMeter:
    """The buckets of one key."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        now = time.monotonic()
        self.limits = (requests_per_minute, tokens_per_minute)
        self._requests = Bucket(requests_per_minute, now) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute, now) if tokens_per_minute else None

    def request(self) -> None:
        """Count a request. Raises RateLimited."""
        self._take("requests", self._requests, 1)

    def reserve(self, tokens: int) -> int:
        """Set tokens aside, and return how many: no more than the bucket holds. Raises RateLimited."""
        tokens = self.bounded(tokens)
        self._take("tokens", self._tokens, tokens)
        return tokens

    def bounded(self, tokens: int) -> int:
        """Return no more tokens than the bucket holds."""
        return tokens if self._tokens is None else min(tokens, self._tokens.limit)

    def settle(self, reserved: int, used: int) -> None:
        """Replace what was reserved by what was used."""
        if self._tokens is not None:
            self._tokens.give(reserved - used, time.monotonic())

    def headers(self) -> Headers:
        """Return where the limits stand, as OpenAI's headers say it."""
        now, told = time.monotonic(), []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told.append((f"x-ratelimit-limit-{name}", str(bucket.limit)))
                told.append((f"x-ratelimit-reset-{name}", _span(bucket.full_in(now))))
                told.append((f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.level)))))
        return [(name.encode(), value.encode()) for name, value in told]

    def _take(self, name: str, bucket: Bucket | None, amount: int) -> None:
        wait = bucket.take(amount, time.monotonic()) if bucket is not None else 0.0
        if bucket is None or not wait:
            return
        wait = max(wait, 0.001)
        raise RateLimited(
            f"the key's limit of {bucket.limit} {name} a minute is reached: {max(0, int(bucket.level))} are left and "
            f"{amount} are asked for; try again in {_span(wait)}",
            code="rate_limit_exceeded",
            kind=name,
            headers=[
                *self.headers(),
                (b"retry-after", b"%d" % math.ceil(wait)),
                (b"retry-after-ms", b"%d" % (wait * 1000 + 1)),
            ],
        )


class TokenReservation:
    """What one call has set aside of its key's tokens; given back where nothing says that it was used."""

    __slots__ = ("_meter", "_reserved", "_used")

    def __init__(self, meter: KeyMeter) -> None:
        self._meter = meter
        self._reserved = 0
        self._used = 0

    def reserve(self, sampling: Mapping[str, Any], body: bytes, context: int | None) -> None:
        """Set aside what a call may need of a model with so long a context, if that is known. Raises RateLimited."""
        self._reserved = self._meter.reserve(estimate(sampling, body, context))

    def reserve_prompt(self, body: bytes) -> None:
        """Count a body whose answer nobody reads here, by its length. Raises RateLimited."""
        self._reserved = self._used = self._meter.reserve(len(body) // _BYTES_PER_TOKEN)

    def use(self, tokens: int, *, left: bool) -> None:
        """Say what the call took. Of a client that left before that was known, the reservation is kept."""
        self._used = self._meter.bounded(tokens or self._reserved) if left else tokens

    def settle(self) -> None:
        """End the reservation."""
        self._meter.settle(self._reserved, self._used)


def estimate(sampling: Mapping[str, Any], body: bytes, context: int | None = None) -> int:
    """Return about how many tokens a call with this body takes, prompt and answers, each within the model's context."""
    asked = lax_values.lax_int(sampling.get("max_completion_tokens") or sampling.get("max_tokens")) or 0
    answers = max(1, lax_values.lax_int(sampling.get("n")) or 1)
    prompt, longest = len(body) // _BYTES_PER_TOKEN, asked if asked > 0 else _USUAL_ANSWER
    if context is not None:
        prompt, longest = min(prompt, context), min(longest, context)
    return prompt + longest * answers


async def with_rate_limits(app: ASGIApp, meter: KeyMeter, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a request under its key's limits. Raises RateLimited."""
    meter.request()
    hold = scope[TOKEN_RESERVATION] = TokenReservation(meter)

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *meter.headers()]
        await send(message)

    try:
        await app(scope, receive, told)
    finally:
        hold.settle()


def _span(seconds: float) -> str:
    """Return a time as OpenAI writes it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // _MINUTE)}m{int(seconds % _MINUTE)}s"
