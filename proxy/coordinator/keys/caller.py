"""Who calls: the id of the key that was sent, and what comes with it. Fixed when the request arrives."""

from __future__ import annotations

import msgspec

from ratchet.proxy.coordinator.limits.rate_limits import KeyMeter


class Caller(msgspec.Struct, frozen=True):
    """`key_id` names the key in records; `trajectory` is the run that a suffix of the key names; `meter` its limits.

    `operator` says that everything may be read and spoken of.
    """

    key_id: str | None
    trajectory: str | None = None
    meter: KeyMeter | None = None
    operator: bool = False


ANONYMOUS = Caller(None)
OPERATOR = Caller(None, operator=True)
