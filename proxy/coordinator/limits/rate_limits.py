"""Limits per key and per agent: requests and tokens per minute, as token buckets with a capacity of one minute.

A request is counted when it arrives. Its tokens are reserved by an estimate (the body's length and max_tokens, within
the model's context), and settled at the end with the actual usage. A call with more tokens than a minute's limit needs
a full bucket, and leaves a debt if it used more. Above a limit the call gets 429 in its dialect's format, with the time
to wait; it is neither recorded nor forwarded.

An agent's limit counts the captured calls to it with any key. It is checked after the key's.

Promises: a key without limits costs nothing here; a key with limits costs two numbers. An estimate, or a call that its
client abandoned, never costs a key more than one full bucket. Several workers count together (`sharing.py`), several
proxies each for themselves. All state belongs to the event loop's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.coordinator.limits.buckets import Bucket
from ratchet.proxy.coordinator.limits.sharing import SharedBucket, Sharing
from ratchet.proxy.coordinator.limits.token_budgets import TokenBudget
from ratchet.proxy.errors import RateLimited
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.asgi import Headers

TOKEN_RESERVATION = "ratchet.token_reservation"  # scope key of the TokenReservation of a call whose key has limits

_BYTES_PER_TOKEN = 4
_DEFAULT_MAX_TOKENS = 512  # of an answer, if the client sets no limit
_MINUTE = 60.0


class KeyMeter:
    """The buckets of one key, or of one agent, and a key's budget; `owner` names it in errors.

    `sharing`: with other workers, which know it as `shared_as`.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        owner: str = "the key",
        budget: TokenBudget | None = None,
        shared_as: str = "",
        sharing: Sharing | None = None,
    ) -> None:
        now = time.monotonic()

        def bucket(kind: str, limit: int | None) -> Bucket | None:
            if not limit:
                return None
            return Bucket(limit, now) if sharing is None else SharedBucket(shared_as, kind, limit, now, sharing)

        self.budget = budget
        self._owner = owner
        self.limits = (requests_per_minute, tokens_per_minute)
        self._requests = bucket("requests", requests_per_minute)
        self._tokens = bucket("tokens", tokens_per_minute)

    def request(self) -> None:
        """Count a request. Raises RateLimited."""
        self._take("requests", self._requests, 1)

    def reserve(self, tokens: int) -> int:
        """Reserve tokens, at most a full bucket; return how many. Raises RateLimited."""
        if self.budget is not None:
            self.budget.check(time.time())
        tokens = self.bounded(tokens)
        self._take("tokens", self._tokens, tokens)
        return tokens

    def bounded(self, tokens: int) -> int:
        """Return `tokens`, at most a full bucket."""
        return tokens if self._tokens is None else int(min(tokens, self._tokens.most(time.monotonic())))

    def settle(self, reserved: int, used: int) -> None:
        """Replace the reserved tokens by the used ones."""
        if self._tokens is not None:
            self._tokens.give(reserved - used, time.monotonic())

    def spend(self, tokens: int) -> None:
        """Count the known tokens of an ended call in the budget."""
        if self.budget is not None and tokens:
            self.budget.add(tokens, time.time())

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers."""
        now, headers = time.monotonic(), []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers.append((f"x-ratelimit-limit-{name}", str(bucket.limit)))
                headers.append((f"x-ratelimit-reset-{name}", _span(bucket.full_in(now))))
                headers.append((f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.level)))))
        return [(name.encode(), value.encode()) for name, value in headers]

    def _take(self, name: str, bucket: Bucket | None, amount: int) -> None:
        wait = bucket.take(amount, time.monotonic()) if bucket is not None else 0.0
        if bucket is None or not wait:
            return
        wait = max(wait, 0.001)
        raise RateLimited(
            f"{self._owner}'s limit of {bucket.limit} {name} per minute is reached: {max(0, int(bucket.level))} are "
            f"left and {amount} are required; try again in {_span(wait)}",
            code="rate_limit_exceeded",
            kind=name,
            headers=[
                *self.headers(),
                (b"retry-after", b"%d" % math.ceil(wait)),
                (b"retry-after-ms", b"%d" % (wait * 1000 + 1)),
            ],
        )


class TokenReservation:
    """The tokens that one call has reserved of each meter; returned at the end unless the call reports its usage."""

    __slots__ = ("_is_bounded", "_known", "_meters", "_reserved", "_used")

    def __init__(self, *meters: KeyMeter) -> None:
        self._meters = list(meters)
        self._reserved: list[int] = []  # of the meters that have accepted the call
        self._used: int | None = 0  # None: what was reserved
        self._known = 0  # tokens that were certainly used
        self._is_bounded = False  # by a full bucket of each meter

    def count_agent(self, meter: KeyMeter) -> None:
        """Count the request for its agent, too. Raises RateLimited."""
        meter.request()
        self._meters.append(meter)

    def reserve(self, sampling: Mapping[str, Any], body: bytes, context: int | None) -> None:
        """Reserve what a call may need; `context` is the model's context length, if known. Raises RateLimited."""
        self._reserve(estimate(sampling, body, context))

    def reserve_prompt(self, body: bytes) -> None:
        """Count a body by its length, for a call whose response is not parsed. Raises RateLimited."""
        self._reserve(len(body) // _BYTES_PER_TOKEN)
        self._used = None

    def use(self, tokens: int, *, left: bool) -> None:
        """Report the usage of the call. If the client left before it was known, the reservation counts."""
        self._used = (tokens or None) if left else tokens
        self._known = tokens
        self._is_bounded = left

    def settle(self) -> None:
        """End the reservation."""
        for meter, reserved in zip(self._meters, self._reserved, strict=False):
            used = reserved if self._used is None else self._used
            meter.settle(reserved, meter.bounded(used) if self._is_bounded else used)
            meter.spend(self._known)

    def _reserve(self, tokens: int) -> None:
        for meter in self._meters:
            self._reserved.append(meter.reserve(tokens))


def estimate(sampling: Mapping[str, Any], body: bytes, context: int | None = None) -> int:
    """Estimate the tokens of a call with this body, prompt and answers, each within the model's context."""
    max_tokens = lax_values.lax_int(sampling.get("max_completion_tokens") or sampling.get("max_tokens")) or 0
    answers = max(1, lax_values.lax_int(sampling.get("n")) or 1)
    prompt, max_tokens = len(body) // _BYTES_PER_TOKEN, max_tokens if max_tokens > 0 else _DEFAULT_MAX_TOKENS
    if context is not None:
        prompt, max_tokens = min(prompt, context), min(max_tokens, context)
    return prompt + max_tokens * answers


async def with_rate_limits(app: ASGIApp, meter: KeyMeter, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a request within its key's limits. Raises RateLimited."""
    meter.request()
    reservation = scope[TOKEN_RESERVATION] = TokenReservation(meter)

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *meter.headers()]
        await send(message)

    try:
        await app(scope, receive, send_with_limits)
    finally:
        reservation.settle()


def _span(seconds: float) -> str:
    """Return a duration in OpenAI's format: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // _MINUTE)}m{int(seconds % _MINUTE)}s"
