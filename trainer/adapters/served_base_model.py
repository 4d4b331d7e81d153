"""Checks that vLLM still serves the base model of the alias's versions.

Asked at the start, before each publication and every few minutes, with the fixed questions of
`store/policies/fingerprints.py`.
While a replica answers differently, nothing is trained, scored against vLLM or published. What the right answers are is
written down by the proxy; as long as they are not known, nothing is said.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ratchet.store.policies import fingerprints
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import EngineError

log = logging.getLogger(__name__)

_EVERY = 300.0  # seconds between two checks
_AGAIN = 10.0  # seconds between two checks while a replica serves another base model


class ServedBaseModel:
    """Checks all replicas of one alias."""

    def __init__(self, store: Store, alias: str, replicas: Sequence[VllmServer]) -> None:
        self._store = store
        self._alias = alias
        self._replicas = replicas
        self._objection: str | None = None
        self._due_at = 0.0

    def objection(self, now: float, *, fresh: bool = False) -> str | None:
        """Return why nothing may be published now, from the last check; `fresh` checks again. Raises no EngineError."""
        if fresh or now >= self._due_at:
            found = self._check()
            if found is not None and found != self._objection:
                log.error("event=other_base_model alias=%s reason=%r", self._alias, found)
                self._store.alarms.raise_(f"base_model:{self._alias}", found)
            if found is None and self._objection is not None:
                log.info("event=base_model_is_back alias=%s", self._alias)
                self._store.alarms.clear(f"base_model:{self._alias}")
            self._objection = found
            self._due_at = now + (_EVERY if found is None else _AGAIN)
        return self._objection

    def _check(self) -> str | None:
        known = self._store.base_models.base_model_of(self._alias)
        if known is None or not known.server_fingerprint:
            return None
        for replica in self._replicas:
            try:
                difference = fingerprints.difference(known.server_fingerprint, replica.fingerprint())
            except EngineError:  # the next caller reports it
                continue
            if difference is not None:
                return (
                    f"vLLM at {replica.url} does not serve {known.name}, the base model that the versions of "
                    f"{self._alias} belong to: {difference}; nothing is trained or published until it does"
                )
        return None
