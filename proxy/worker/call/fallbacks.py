"""Which model of `model_list` answers a call that its own model cannot answer, by the setting `fallbacks`.

Two reasons: an outage (no replica could be reached, or all answered 502, 503 or 504), and a prompt that is longer than
the model's context. A timeout or a 429 is none: the client has waited, or shall come later.

A fallback is a call of its own to the other model: recorded as that model's, and never trained. The failed call stays
recorded as failed. Rollouts and calls of a named version never fall back: they measure one model. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from ratchet.proxy.coordinator.rollouts.rollout_plans import PREFIX
from ratchet.proxy.coordinator.versions.policy_cache import Access
from ratchet.proxy.errors import (
    ContextOverflow,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from ratchet.proxy.model_list import FallbackRules
from ratchet.store.records import CallStarted

_DOWN = (502, 503, 504)
_VERSION = "@"


class Fallbacks(NamedTuple):
    """The models that may still answer a call, in order, by reason."""

    outage: tuple[str, ...] = ()
    context_length: tuple[str, ...] = ()

    def model_after(self, error: UpstreamError) -> str | None:
        """Return the model that is asked next after this error; None: the client gets the error."""
        return next(iter(self._models(error)), None)

    def rest_after(self, error: UpstreamError) -> Fallbacks:
        """Return what is left if that model fails, too."""
        rest = self._models(error)[1:]
        return Fallbacks(rest, rest)

    def _models(self, error: UpstreamError) -> tuple[str, ...]:
        if isinstance(error, ContextOverflow):
            return self.context_length
        return self.outage if _is_outage(error) else ()


NO_FALLBACKS = Fallbacks()


def fallbacks_of(rules: FallbackRules, model: str, access: Access) -> Fallbacks:
    """Return the fallbacks of a requested model, those that the caller's key may call."""
    if _VERSION in model:
        return NO_FALLBACKS
    found = (rules.outage.get(model, ()), rules.context_length.get(model, ()))
    return Fallbacks(*(tuple(filter(access.has_model, names)) for names in found))


def may_fall_back(start: CallStarted) -> bool:
    """Return whether a call may be answered by another model: not if it is part of a rollout."""
    return not start.trajectory_id.startswith(PREFIX)


def _is_outage(error: UpstreamError) -> bool:
    if isinstance(error, UpstreamTimeout):
        return False
    return isinstance(error, (UpstreamUnreachable, UpstreamDisconnected)) or error.status in _DOWN
