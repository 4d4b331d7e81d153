"""`ratchet_policy_info`: which versions there are, read from the policy book when Prometheus asks.

Retired and rejected versions are left out: there are ever more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ratchet.store.records import Policy
from ratchet.store.states import PolicyState

_SHOWN = (PolicyState.CANDIDATE, PolicyState.CANARY, PolicyState.LIVE)


class PolicyInfo(Collector):
    """One series per version that serves or may soon."""

    def __init__(self, known: Callable[[], Iterable[Policy]]) -> None:
        self._known = known

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one family."""
        family = GaugeMetricFamily("ratchet_policy_info", "1 per version in use", labels=["alias", "version", "state"])
        for policy in self._known():
            if policy.state in _SHOWN:
                family.add_metric([policy.alias, str(policy.version), str(policy.state)], 1)
        yield family
