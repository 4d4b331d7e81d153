"""The store: one object with the operations on every table."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.access.audit import AuditVerbs
from ratchet.store.access.keys import Keys
from ratchet.store.calls.calls import Calls
from ratchet.store.calls.feedback import FeedbackVerbs
from ratchet.store.calls.resamples import Resamples
from ratchet.store.calls.resume_state import ResumeState
from ratchet.store.calls.tool_call_outcomes import ToolCallVerbs
from ratchet.store.calls.trajectories import Trajectories
from ratchet.store.calls.usage import UsageVerbs
from ratchet.store.coordination.activity import Activity
from ratchet.store.coordination.alarms import Alarms
from ratchet.store.coordination.job_progress import JobProgressVerbs
from ratchet.store.coordination.leases import Leases
from ratchet.store.coordination.proxies import ProxyInstances
from ratchet.store.db.engine import connect, ensure_schema, missing_file
from ratchet.store.deletion.deletion import Deletions
from ratchet.store.errors import StoreError, StoreNotFound
from ratchet.store.policies.base_models import BaseModels
from ratchet.store.policies.decisions import Decisions
from ratchet.store.policies.policies import Policies
from ratchet.store.policies.prompts import Prompts
from ratchet.store.policies.releases import Releases
from ratchet.store.training.answer_training import AnswerTrainings
from ratchet.store.training.groups import Groups
from ratchet.store.training.lineage import Lineage
from ratchet.store.training.observations import Observations
from ratchet.store.training.rounds import Rounds
from ratchet.store.training.version_behavior import VersionBehaviors
from ratchet.store.training.waiting_times import WaitingTimes
from ratchet.store.tuning.rollouts import Rollouts
from ratchet.store.tuning.tasks import TaskRows
from ratchet.store.tuning.tunings import Tunings


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

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


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
