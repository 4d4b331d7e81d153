"""What a worker reports of the limits: an amount that it took."""

from __future__ import annotations

import msgspec

RUNNING = "running"  # the kind of a number of requests that run at once


class Amount(msgspec.Struct, frozen=True):
    """An amount of one limit.

    Its owner is a key or an agent. `limit`: per minute; 0 without one. `taken`: since the last report. `level`: what
    the worker knows, with `taken`: the rest of a bucket, the used tokens of a budget, the worker's running requests.
    """

    owner: str
    kind: str
    limit: int
    taken: float
    level: float
    period: str = ""  # the day or month of a budget
