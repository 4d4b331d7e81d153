"""Whether vLLM has time to spare: how many calls its replicas run and have waiting, by their own metrics.

A replica that does not say is taken for busy, and the reason is told. Times out after `timeout` seconds, since a server
that is slow to answer is not idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ratchet.store.access.url_credentials import credentials, without_credentials

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_REMEMBERED = 100  # looks


@dataclass(frozen=True, slots=True)
class Load:
    """What all replicas run and have waiting; `unknown` says why that cannot be told."""

    running: int = 0
    waiting: int = 0
    unknown: str | None = None

    def spare(self, own: int, max_running_requests: int) -> bool:
        """Return whether a further call takes nobody's place; `own` of the running calls count for nothing."""
        return self.unknown is None and self.waiting == 0 and self.running - own <= max_running_requests


class BusyPeriod:
    """How long every look has found vLLM busy, and what it ran of others' calls meanwhile."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._others: deque[int] = deque(maxlen=_REMEMBERED)

    def saw(self, others: int, now: float) -> None:
        """Add a look that found vLLM busy with so many calls of others."""
        self._since = now if self._since is None else self._since
        self._others.append(others)

    def still(self) -> None:
        """Forget it: a call could begin."""
        self._since = None
        self._others.clear()

    def seconds(self, now: float) -> float:
        """Return for how long there was no idle moment."""
        return 0.0 if self._since is None else now - self._since

    def told(self, max_running_requests: int) -> str:
        """Return what was seen, with the remedy."""
        few, many = min(self._others, default=0), max(self._others, default=0)
        seen = f"vLLM ran {few} to {many} other calls at {len(self._others)} looks"
        if many <= max_running_requests:
            return f"{seen}, with others waiting: it has no time to spare; add a replica, or ask for fewer resamples"
        return (
            f"{seen}, and trainer.resample.max_running_requests is {max_running_requests}: "
            f"set it to {many}, or wait for less traffic"
        )


def load_of(urls: Sequence[str], key: str | None, timeout: float = 2.0) -> Load:
    """Return the load of the replicas at these addresses, without /v1."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    running = waiting = 0
    with httpx.Client(timeout=timeout, headers=headers, trust_env=False) as http:
        for whole in urls:
            url = without_credentials(whole)
            try:
                answer = http.get(f"{url}/metrics", auth=credentials(whole))
                told = _told(answer.text) if answer.status_code == httpx.codes.OK else {}
            except (httpx.HTTPError, ValueError) as error:
                return Load(unknown=f"vLLM at {url} does not tell its load ({error or type(error).__name__})")
            if RUNNING not in told:
                return Load(unknown=f"vLLM at {url} shows no {RUNNING} at /metrics (is --disable-log-stats set?)")
            running += told[RUNNING]
            waiting += told.get(WAITING, 0)
    return Load(running, waiting)


def _told(text: str) -> dict[str, int]:
    """Return the two gauges of a metrics page, summed over vLLM's engines."""
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (RUNNING, WAITING):
            sums[family.name] = round(sum(sample.value for sample in family.samples))
    return sums
