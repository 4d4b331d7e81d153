"""The learner service's Prometheus metrics. docs/metrics.md documents every name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from ratchet.trainer.learner_service.compute_thread import ComputeThread, Operation
from ratchet.trainer.learner_service.operations import AgentSessions

disable_created_metrics()  # type: ignore[no-untyped-call]  # an additional sample per counter with its creation time

_LABELS = ["alias", "verb"]


class LearnerMetrics:
    """The metrics of one learner, in their own registry."""

    def __init__(self, sessions: AgentSessions) -> None:
        self._sessions = sessions
        self.registry = registry = CollectorRegistry()
        self._operations = Counter(
            "ratchet_learner_operations", "Operations by verb and end", [*_LABELS, "state"], registry=registry
        )
        self._seconds = Counter("ratchet_learner_compute_seconds", "Compute time", _LABELS, registry=registry)
        self._waiting = Gauge("ratchet_learner_waiting", "Operations that wait", ["alias"], registry=registry)
        self._ready = Gauge("ratchet_learner_ready", "1 once the base model is loaded", registry=registry)
        self._agents = Gauge("ratchet_learner_agents", "Open agents", registry=registry)

    def count(self, operation: Operation, seconds: float) -> None:
        state = "failed" if operation.answer is None or operation.answer.error else "done"
        self._operations.labels(operation.agent, operation.verb, state).inc()
        self._seconds.labels(operation.agent, operation.verb).inc(seconds)

    def page(self, thread: ComputeThread) -> bytes:
        """Return the metrics in Prometheus text format."""
        sessions = self._sessions.all()
        self._ready.set(thread.ready)
        self._agents.set(len(sessions))
        self._waiting.clear()
        for session in sessions:
            self._waiting.labels(session.agent).set(thread.waiting_of(session.agent))
        return generate_latest(self.registry)
