"""The processes of a proxy with several workers: their settings, and what each one runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.restore import LinkingRestore
from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlans
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.coordinator.worker_sessions import WorkerSessions
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.coordination.outage_linker import OutageLinker
from ratchet.proxy.worker.coordination.remote_admission import RemoteAdmission

_MAX_BODY_BYTES = 2**24  # of a request that is forwarded to the coordinator


class WorkerRole(NamedTuple):
    """One of several workers. `token` is the secret that it shares with the coordinator."""

    name: str
    coordinator_url: str
    token: str

    def make_admission(
        self,
        settings: ProxySettings,
        policies: PolicyCache,
        rollouts: RolloutPlans,
        contexts: TokenContexts | None,
        metrics: ProxyMetrics,
        critical_tasks: CriticalTasks,
    ) -> RemoteAdmission:
        """Return the admission of a worker."""
        limits = (settings.trajectory_idle_seconds, settings.max_linking_bytes, settings.max_linking_bytes_per_key)
        return RemoteAdmission(
            self.coordinator_url,
            self.token,
            self.name,
            policies,
            contexts,
            metrics,
            lambda: OutageLinker(*limits),
            lambda linker: Admission(policies, linker, rollouts, None),
            critical_tasks,
        )


class CoordinatorRole(NamedTuple):
    """The coordinator of several workers. `worker_urls`: the address of each worker's own listener, by its name."""

    worker_urls: Mapping[str, str]
    token: str

    def make_sessions(
        self, admission: Admission, linker: TrajectoryLinker, restore: LinkingRestore, critical_tasks: CriticalTasks
    ) -> WorkerSessions:
        """Return the sessions with the workers; they restore linking."""
        return WorkerSessions(admission, linker, restore.start, self.token, len(self.worker_urls), critical_tasks)


Role = WorkerRole | CoordinatorRole
