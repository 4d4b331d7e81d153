"""Checks that vLLM still serves the base model of the alias's versions.

It sends the fixed prompts of `store/policies/fingerprints.py` at the start, before each release and every few minutes.
The proxy records the expected fingerprint; until then the check passes. While a replica's fingerprint differs, nothing
is trained, scored against vLLM or released.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ratchet.store.policies import fingerprints
from ratchet.store.store import Store
from ratchet.trainer.adapters.replica_fleet import ask_all
from ratchet.trainer.adapters.vllm_api import VllmServer

log = logging.getLogger(__name__)

_EVERY = 300.0  # seconds between two checks
_AGAIN = 10.0  # seconds between two checks while a replica serves another base model


class ServedBaseModel:
    """Checks all replicas of one alias."""

    def __init__(self, store: Store, alias: str, replicas: Sequence[VllmServer]) -> None:
        self._store = store
        self._alias = alias
        self._replicas = replicas
        self._blocking_reason: str | None = None
        self._due_at = 0.0

    @property
    def known_reason(self) -> str | None:
        """Why nothing may be released, from the last check; None before the first one."""
        return self._blocking_reason

    def is_due(self, now: float) -> bool:
        """Whether `blocking_reason` would ask vLLM."""
        return now >= self._due_at

    def blocking_reason(self, now: float, *, fresh: bool = False) -> str | None:
        """Return why nothing may be released, from the last check; `fresh` checks again. Raises no EngineError."""
        if fresh or now >= self._due_at:
            reason = self._check()
            if reason is not None and reason != self._blocking_reason:
                log.error("event=other_base_model alias=%s reason=%r", self._alias, reason)
                self._store.alarms.raise_(f"base_model:{self._alias}", reason)
            if reason is None and self._blocking_reason is not None:
                log.info("event=base_model_is_back alias=%s", self._alias)
                self._store.alarms.clear(f"base_model:{self._alias}")
            self._blocking_reason = reason
            self._due_at = now + (_EVERY if reason is None else _AGAIN)
        return self._blocking_reason

    def _check(self) -> str | None:
        expected = self._store.base_models.base_model_of(self._alias)
        if expected is None or not expected.server_fingerprint:
            return None
        found, _ = ask_all(tuple(self._replicas), VllmServer.fingerprint, 1)  # the next caller reports the errors
        for url, fingerprint in found.items():
            difference = fingerprints.difference(expected.server_fingerprint, fingerprint)
            if difference is not None:
                return (
                    f"vLLM at {url} does not serve {expected.name}, the base model that the versions of "
                    f"{self._alias} belong to: {difference}; nothing is trained or published until it does"
                )
        return None
