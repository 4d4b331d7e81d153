"""The load of vLLM: running and waiting calls of all replicas, from their Prometheus metrics.

A replica that does not report its load counts as busy, with the reason. A server that answers slowly is not idle, so
requests time out after `timeout` seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ratchet.store.access.replicas import credentials, without_credentials

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_MAX_CHECKS = 100


@dataclass(frozen=True, slots=True)
class VllmLoad:
    """Running and waiting calls of all replicas; `unknown` is the reason if they are not known."""

    running: int = 0
    waiting: int = 0
    unknown: str | None = None

    def spare(self, own: int, max_running_requests: int) -> bool:
        """Return whether another call would delay nobody; `own` of the running calls are not counted."""
        return self.unknown is None and self.waiting == 0 and self.running - own <= max_running_requests


class BusyPeriod:
    """How long vLLM has been busy at every check, and how many other calls it ran."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._others: deque[int] = deque(maxlen=_MAX_CHECKS)

    def record(self, others: int, now: float) -> None:
        """Record a check at which vLLM was busy with this many other calls."""
        self._since = now if self._since is None else self._since
        self._others.append(others)

    def reset(self) -> None:
        """End the period: a call could start."""
        self._since = None
        self._others.clear()

    def seconds(self, now: float) -> float:
        """Return how long vLLM has been busy."""
        return 0.0 if self._since is None else now - self._since

    def describe(self, max_running_requests: int) -> str:
        """Return the observed load, with the remedy."""
        few, many = min(self._others, default=0), max(self._others, default=0)
        seen = f"vLLM ran {few} to {many} other calls at {len(self._others)} checks"
        if many <= max_running_requests:
            return f"{seen}, with others waiting: it has no spare capacity; add a replica, or ask for fewer resamples"
        return (
            f"{seen}, and trainer.resample.max_running_requests is {max_running_requests}: "
            f"set it to {many}, or wait for less traffic"
        )


def load_of(urls: Sequence[str], key: str | None, timeout: float = 2.0) -> VllmLoad:
    """Return the load of the replicas at these URLs, without /v1."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    running = waiting = 0
    with httpx.Client(timeout=timeout, headers=headers, trust_env=False) as http:
        for whole in urls:
            url = without_credentials(whole)
            try:
                answer = http.get(f"{url}/metrics", auth=credentials(whole))
                gauges = _parse_gauges(answer.text) if answer.status_code == httpx.codes.OK else {}
            except (httpx.HTTPError, ValueError) as error:
                return VllmLoad(unknown=f"vLLM at {url} does not report its load ({error or type(error).__name__})")
            if RUNNING not in gauges:
                return VllmLoad(unknown=f"vLLM at {url} shows no {RUNNING} at /metrics (is --disable-log-stats set?)")
            running += gauges[RUNNING]
            waiting += gauges.get(WAITING, 0)
    return VllmLoad(running, waiting)


def _parse_gauges(text: str) -> dict[str, int]:
    """Return both gauges of a metrics page, summed over vLLM's engines."""
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (RUNNING, WAITING):
            sums[family.name] = round(sum(sample.value for sample in family.samples))
    return sums
