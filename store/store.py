"""The store: one object with the operations on every table."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from typing import Self

import sqlalchemy as sa

from ratchet.store.access.keys import AuditVerbs, Keys
from ratchet.store.calls.calls import Calls
from ratchet.store.calls.feedback import FeedbackVerbs
from ratchet.store.calls.resamples import Resamples
from ratchet.store.calls.resume_state import ResumeState
from ratchet.store.calls.tool_call_outcomes import ToolCallVerbs
from ratchet.store.calls.trajectories import Trajectories
from ratchet.store.calls.usage import UsageVerbs
from ratchet.store.coordination import Activity, Alarms, JobProgressVerbs, Leases, ProxyInstances
from ratchet.store.db.engine import call_on_damage, connect, ensure_schema, missing_file
from ratchet.store.deletion import Deletions
from ratchet.store.errors import StoreDamaged, StoreError, StoreNotFound
from ratchet.store.policies.base_models import BaseModels
from ratchet.store.policies.policies import Policies, Prompts
from ratchet.store.policies.releases import Releases
from ratchet.store.policies.serving import Decisions
from ratchet.store.training.groups import Groups
from ratchet.store.training.observations import Observations, VersionBehaviors, WaitingTimes
from ratchet.store.training.rounds import AnswerTrainings, Lineage, Rounds
from ratchet.store.tuning import Rollouts, TaskRows, Tunings

log = logging.getLogger(__name__)

DAMAGE_ALARM = "store_damaged"
_DAMAGE_SECONDS = 60.0  # between two reports


class Store:
    """Operations by subject."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.calls = Calls(engine)
        self.resume_state = ResumeState(engine)
        self.trajectories = Trajectories(engine)
        self.groups = Groups(engine)
        self.feedback = FeedbackVerbs(engine)
        self.policies = Policies(engine)
        self.base_models = BaseModels(engine)
        self.prompts = Prompts(engine)
        self.decisions = Decisions(engine)
        self.releases = Releases(engine)
        self.rounds = Rounds(engine)
        self.answer_training = AnswerTrainings(engine)
        self.lineage = Lineage(engine)
        self.behavior = VersionBehaviors(engine)
        self.waiting_times = WaitingTimes(engine)
        self.tasks = TaskRows(engine)
        self.tunings = Tunings(engine)
        self.rollouts = Rollouts(engine)
        self.resamples = Resamples(engine)
        self.leases = Leases(engine)
        self.proxy_instances = ProxyInstances(engine)
        self.activity = Activity(engine)
        self.alarms = Alarms(engine)
        self.tools = ToolCallVerbs(engine)
        self.observations = Observations(engine)
        self.job_progress = JobProgressVerbs(engine)
        self.keys = Keys(engine)
        self.usage = UsageVerbs(engine)
        self.audit = AuditVerbs(engine)
        self.deletions = Deletions(engine)
        self._damage_reported_at = -math.inf
        call_on_damage(engine, self._report_damage)

    def _report_damage(self, damage: StoreDamaged) -> None:
        """Raise the alarm, once a minute, if the database still takes it; the log has the error in any case."""
        if time.monotonic() - self._damage_reported_at < _DAMAGE_SECONDS:
            return
        self._damage_reported_at = time.monotonic()
        log.error("event=store_damaged reason=%r", str(damage))
        with contextlib.suppress(StoreError, sa.exc.DatabaseError):
            self.alarms.raise_(DAMAGE_ALARM, f"{damage}, and clears this alarm once it finds nothing")

    def close(self) -> None:
        """Close every connection, as the end of a `with` block does."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at a database URL or an SQLite path; create the schema in an empty database.

    Raises SchemaMismatch if another version of Ratchet created the database, StoreUnavailable if it does not answer,
    StoreNotFound if there is no SQLite file and `create` is False.
    """
    engine = connect(url, create)
    if not create and (file := missing_file(engine)):
        engine.dispose()
        raise StoreNotFound(f"there is no store at {file}: nothing was recorded there; give --store or --project")
    try:
        ensure_schema(engine)
    except StoreError:
        engine.dispose()
        raise
    return Store(engine)
