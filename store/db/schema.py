"""Every table of the store, by name.

Each uniqueness rule is a database constraint with the rule above it. Until the first release the database is created
from these tables, and a change of them needs another `engine.HEAD`.
"""

from __future__ import annotations

from ratchet.store.db.table_types import metadata as metadata
from ratchet.store.db.tables.operations import alarms as alarms
from ratchet.store.db.tables.operations import audit_entries as audit_entries
from ratchet.store.db.tables.operations import deletions as deletions
from ratchet.store.db.tables.operations import keys as keys
from ratchet.store.db.tables.operations import leases as leases
from ratchet.store.db.tables.operations import orphan_candidates as orphan_candidates
from ratchet.store.db.tables.operations import proxy_instances as proxy_instances
from ratchet.store.db.tables.operations import usage as usage
from ratchet.store.db.tables.policies import base_models as base_models
from ratchet.store.db.tables.policies import decisions as decisions
from ratchet.store.db.tables.policies import policies as policies
from ratchet.store.db.tables.policies import prompts as prompts
from ratchet.store.db.tables.policies import releases as releases
from ratchet.store.db.tables.traffic import calls as calls
from ratchet.store.db.tables.traffic import choices as choices
from ratchet.store.db.tables.traffic import feedback as feedback
from ratchet.store.db.tables.traffic import messages as messages
from ratchet.store.db.tables.traffic import prompt_blocks as prompt_blocks
from ratchet.store.db.tables.traffic import resamples as resamples
from ratchet.store.db.tables.traffic import tool_calls as tool_calls
from ratchet.store.db.tables.traffic import toolsets as toolsets
from ratchet.store.db.tables.traffic import trajectories as trajectories
from ratchet.store.db.tables.traffic import trajectory_tags as trajectory_tags
from ratchet.store.db.tables.training import answer_training as answer_training
from ratchet.store.db.tables.training import groups as groups
from ratchet.store.db.tables.training import job_progress as job_progress
from ratchet.store.db.tables.training import judge_requests as judge_requests
from ratchet.store.db.tables.training import observations as observations
from ratchet.store.db.tables.training import rounds as rounds
from ratchet.store.db.tables.training import sft_trajectories as sft_trajectories
from ratchet.store.db.tables.training import teacher_scores as teacher_scores
from ratchet.store.db.tables.training import verdicts as verdicts
from ratchet.store.db.tables.tuning import rollouts as rollouts
from ratchet.store.db.tables.tuning import tasks as tasks
from ratchet.store.db.tables.tuning import tunings as tunings
