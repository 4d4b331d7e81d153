"""The memory: tables and the verbs over them. Knows no other room.

`open_store(url)` returns the one object that proxy, trainer and face use. Every verb is synchronous, is one
transaction, and returns frozen records.
"""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.alarms import Alarms
from ratchet.store.base_models import BaseModels
from ratchet.store.calls import Calls
from ratchet.store.database import connect, ensure_schema, missing_file
from ratchet.store.decisions import Decisions
from ratchet.store.deletion import Deletions
from ratchet.store.doors import Doors
from ratchet.store.errors import StoreError, StoreMissing
from ratchet.store.feedback import Feedbacks
from ratchet.store.groups import Groups
from ratchet.store.keys import Keys
from ratchet.store.leases import Leases
from ratchet.store.lineage import Lineage
from ratchet.store.observations import Observations
from ratchet.store.open_runs import OpenRuns
from ratchet.store.policies import Policies
from ratchet.store.prompts import Prompts
from ratchet.store.rollouts import Rollouts
from ratchet.store.rounds import Rounds
from ratchet.store.shadows import Shadows
from ratchet.store.tasks import Tasks
from ratchet.store.tools import Tools
from ratchet.store.trajectories import Trajectories
from ratchet.store.tunings import Tunings
from ratchet.store.works import Works

__all__ = ["Store", "open_store"]


class Store:
    """The verbs, by noun."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.calls = Calls(engine)
        self.open_runs = OpenRuns(engine)
        self.trajectories = Trajectories(engine)
        self.groups = Groups(engine)
        self.feedback = Feedbacks(engine)
        self.policies = Policies(engine)
        self.base_models = BaseModels(engine)
        self.prompts = Prompts(engine)
        self.decisions = Decisions(engine)
        self.rounds = Rounds(engine)
        self.lineage = Lineage(engine)
        self.tasks = Tasks(engine)
        self.tunings = Tunings(engine)
        self.rollouts = Rollouts(engine)
        self.shadows = Shadows(engine)
        self.leases = Leases(engine)
        self.doors = Doors(engine)
        self.alarms = Alarms(engine)
        self.tools = Tools(engine)
        self.observations = Observations(engine)
        self.works = Works(engine)
        self.keys = Keys(engine)
        self.deletions = Deletions(engine)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at a database URL or an SQLite path; an empty database gets its schema.

    Raises StoreError: SchemaMismatch where another version of Ratchet made the database, StoreUnavailable where
    it does not answer, StoreMissing where there is no SQLite file and none is to be made.
    """
    engine = connect(url, create)
    if not create and (file := missing_file(engine)):
        engine.dispose()
        raise StoreMissing(f"there is no store at {file}: nothing was recorded there; give --store or --project")
    try:
        ensure_schema(engine)
    except StoreError:
        engine.dispose()
        raise
    return Store(engine)
