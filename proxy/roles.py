"""The processes of a proxy with several workers: their settings, and what each one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.coordinator_lease import CoordinatorLease
from ratchet.proxy.coordinator.known_workers import KnownWorkers
from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker
from ratchet.proxy.coordinator.linking.restore import LinkingRestore
from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlans
from ratchet.proxy.coordinator.unheard_workers import UnheardWorkers
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.coordinator.worker_sessions import WorkerSessions
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.coordination.limit_reports import LimitReports
from ratchet.proxy.worker.coordination.remote_admission import RemoteAdmission
from ratchet.proxy.worker.http.routing import LifespanService
from ratchet.store.store import Store

FIRST_WORKER = "worker-1"


def session_name(machine: str, worker: str) -> str:
    """Return the name of a worker among those of all machines."""
    return f"{machine}/{worker}"


class WorkerRole(NamedTuple):
    """One of several workers. `token` is the secret that it shares with the coordinators.

    `machine`: this proxy's name among those of other machines. `other_workers`: the addresses of the own listeners of
    this proxy's other workers, by name. `own_coordinator_url`: None if this proxy runs no coordinator.
    `is_restarted`: it has served before under its supervisor.
    """

    name: str
    machine: str
    coordinators: tuple[str, ...]
    token: str
    other_workers: Mapping[str, str]
    own_coordinator_url: str | None
    is_restarted: bool = False

    @property
    def ships_left_journals(self) -> bool:
        """Whether this worker ships the journals of earlier ones, because no coordinator of this proxy does."""
        return self.own_coordinator_url is None and self.name == FIRST_WORKER

    def make_admission(
        self,
        settings: ProxySettings,
        store: Store,
        policies: PolicyCache,
        rollouts: RolloutPlans,
        contexts: TokenContexts | None,
        metrics: ProxyMetrics,
        limit_reports: LimitReports,
        is_behind: Callable[[], bool],
        critical_tasks: CriticalTasks,
    ) -> RemoteAdmission:
        """Return the admission of a worker. `is_behind`: whether the store lacks calls of its earlier processes."""
        limits = (settings.trajectory_idle_seconds, settings.max_linking_bytes, settings.max_linking_bytes // 2)
        return RemoteAdmission(
            self.coordinators,
            self.token,
            session_name(self.machine, self.name),
            policies,
            contexts,
            metrics,
            lambda: CautiousLinker(*limits),
            lambda linker: Admission(policies, linker, rollouts, None),
            limit_reports,
            is_behind,
            (lambda linker: LinkingRestore(linker, store, limits[0]).restore()) if self.is_restarted else None,
            critical_tasks,
        )


class CoordinatorRole(NamedTuple):
    """The coordinator of several workers.

    `worker_urls`: the address of each worker's own listener, by its name. `group`: names the proxies of several
    machines that share coordinators; None if this proxy is alone. `lease_owner`: what holds the lease of the one that
    decides; None if there is no other.
    """

    machine: str
    worker_urls: Mapping[str, str]
    token: str
    group: str | None
    lease_owner: str | None

    def make_sessions(
        self,
        settings: ProxySettings,
        store: Store,
        admission: Admission,
        linker: CautiousLinker,
        restore: LinkingRestore,
        critical_tasks: CriticalTasks,
    ) -> tuple[WorkerSessions, Sequence[LifespanService]]:
        """Return the sessions with the workers, which restore linking, and the services that they need."""
        names = [session_name(self.machine, worker) for worker in self.worker_urls]
        known = lease = None
        seconds = settings.trajectory_idle_seconds
        if self.group is not None and self.lease_owner is not None:
            lease = CoordinatorLease(store, self.group, self.lease_owner, critical_tasks)
        if self.group is not None:
            known = KnownWorkers(
                store, self.group, self.machine, seconds, lambda: sessions.active_workers(), critical_tasks
            )
        unheard = UnheardWorkers(names, seconds)
        sessions = WorkerSessions(
            admission, linker, restore.restore, self.token, names, unheard, known, lease, critical_tasks
        )
        return sessions, [one for one in (lease, known) if one is not None]


Role = WorkerRole | CoordinatorRole
