"""LearnerWork: what needs an agent's learner: rounds, warm starts and publications. Everything here may take minutes.

Only one thread at a time may use it; `AgentController` decides when, and calls it in the background.

The learner's weights belong to `version` unless they are dirty: they then hold steps without a commit, or other
settings, and are reloaded from the newest commit before the next round or release. A new agent with
`learner.init_adapter` has that adapter committed as its first version when the learner is opened; from then on the
commits count, also if that version is rejected.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition
from ratchet.store.operation_records import Tuning
from ratchet.store.records import BASE_VERSION, Group, PastScore, Policy
from ratchet.store.states import SERVING, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.adapters.base_model_files import ServedBaseModel
from ratchet.trainer.errors import OutOfMemory, TrainingDiverged
from ratchet.trainer.learner_api import LearnerProtocol
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.release.release import PublishResult, Release
from ratchet.trainer.rounds.round_runner import MemoryLimit, RoundRunner
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.warm_start import REFUSALS, SFTRound, WarmStartRequests, learner_settings

log = logging.getLogger(__name__)

LearnerFactory = Callable[[TrainerSettings, str | None], LearnerProtocol]  # with the reference to resume from


@dataclass(frozen=True, slots=True)
class Publication:
    """The outcome of one attempt to publish.

    `waiting`: the candidate still is one, until its evaluation has ended, vLLM serves its base model, or there is
    traffic to prove an adopted one with.
    `prune_pending`: there may be more to prune later.
    """

    waiting: bool
    prune_pending: bool = True


class LearnerWork:
    """The learner of one agent, and what is done with it."""

    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        make_learner: LearnerFactory,
        round_runner: RoundRunner,
        memory: MemoryLimit,
        release: Release,
        base: ServedBaseModel,
        warm_starts: WarmStartRequests,
        best_versions: Callable[[], Sequence[int]],
        progress: Progress,
        adapters: AdapterStore,
    ) -> None:
        self._settings = settings
        self._store = store
        self._make_learner = make_learner
        self._round_runner = round_runner
        self._memory = memory
        self._release = release
        self._base = base
        self._warm_starts = warm_starts
        self._best_versions = best_versions
        self._progress = progress
        self._adapters = adapters
        self._learner: LearnerProtocol | None = None
        self._opening = threading.Lock()
        self.version = round_runner.newest_commit()[0]  # that the learner's weights belong to
        self._dirty = memory.is_reduced

    @property
    def learner(self) -> LearnerProtocol:
        """The learner; made with the newest commit when it is first needed, which may take minutes."""
        with self._opening:
            if self._learner is None:
                self.version, resume_from = self._round_runner.newest_commit()
                first = not self._round_runner.has_commits
                learner = self._make_learner(self._settings if first else _without_initial(self._settings), resume_from)
                initial = self._settings.learner.init_adapter
                if first and initial is not None:
                    self.version = self._round_runner.adopt_initial(learner, initial).version
                self._learner = learner
                learner.report_progress_to(self._progress)
                log.info("event=learner_ready alias=%s version=%d", self._settings.model, self.version)
            return self._learner

    def open(self) -> None:
        """Make the learner, so that what is wrong with it shows at the start."""
        _ = self.learner

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()

    def train(self, groups: Sequence[Group]) -> Policy | OutOfMemory | None:
        """Train a round and commit it; return the candidate, None without one, or why it did not fit into memory."""
        self._reload()
        self._dirty = True  # until the commit
        try:
            candidate = self._round_runner.run_round(self.learner, groups, self.version)
        except TrainingDiverged as diverged:
            log.error("event=round_diverged alias=%s reason=%r", self._settings.model, str(diverged))
            return None
        except OutOfMemory as error:
            return error
        self._dirty = False
        if candidate is not None:
            self.version = candidate.version
        return candidate

    def warm_start(self, request: Tuning) -> None:
        """Run the warm start that a tuning run requests, or refuse it."""
        try:
            settings, data = self._warm_starts.gather(request)
            learner = self.learner
            self._dirty = True
            version, resume_from = self._round_runner.newest_commit()
            now = dataclasses.replace(self._memory.learner_settings, init_adapter=None)
            learner.load(resume_from, learner_settings(settings, now, len(data.rows)))
            sft_round = SFTRound(self._store, self._round_runner, self._settings.model)
            sft_round.run(learner, data, settings, version, request.id)
        except REFUSALS as refusal:
            self._warm_starts.refuse(request, str(refusal))

    def publish(self, candidate: Policy) -> Publication:
        """Publish a candidate, unless vLLM serves another base model; prune if it waits for nothing any more."""
        if not self._round_runner.can_be_proven(candidate):
            return Publication(waiting=True)
        if self._base.blocking_reason(time.time(), fresh=True) is not None:
            return Publication(waiting=True)
        waiting = False
        try:
            self._reload()  # after a warm start, or a round without a commit
            probes = self._round_runner.probes(candidate)
            waiting = self._release.publish(candidate, probes, self.learner) is PublishResult.EVALUATING
        except InvalidTransition as overtaken:  # by a person's decision
            log.info("event=publish_overtaken alias=%s reason=%r", self._settings.model, str(overtaken))
        return Publication(waiting, prune_pending=waiting or self.prune())

    def catch_up(self, now: float, *, prune: bool) -> bool:
        """Prove what is served on replicas that came later; prune if asked, and return whether more is left."""
        self._release.proofs.catch_up(now, self._round_runner.probes, self.learner)
        return prune and self.prune()

    def prune(self) -> bool:
        """Remove the checkpoints that no version in use, no resumption and no rollback needs; return whether a
        trajectory is pinned to a version, so that there may be more to remove later.
        """
        settings, alias = self._settings, self._settings.model
        in_use = versions_in_use(self._store, alias, time.time())
        folders, states = retained(
            self._store.policies.all(alias),
            pinned=in_use,
            best=self._best_versions(),
            newest=settings.keep_checkpoints,
            states=settings.keep_optimizer_states,
        )
        for old in self._store.policies.all(alias):  # marked first: nobody can promote a half-removed version
            if old.version not in folders and old.adapter and old.pruned_at is None:
                self._store.policies.prune(alias, old.version, time.time())
        removed = self._adapters.prune(settings.versions, folders, states)
        if removed:
            log.info("event=versions_pruned alias=%s versions=%s", alias, ",".join(map(str, removed)))
        return bool(in_use)

    def _reload(self) -> None:
        """Load the newest commit if the learner is dirty or holds another version."""
        learner = self.learner
        version, resume_from = self._round_runner.newest_commit()
        if self._dirty or version != self.version:  # a version may have been rejected since
            learner.load(resume_from, dataclasses.replace(self._memory.learner_settings, init_adapter=None))
            self.version, self._dirty = version, False


def _without_initial(settings: TrainerSettings) -> TrainerSettings:
    return settings.model_copy(update={"learner": dataclasses.replace(settings.learner, init_adapter=None)})


# Retention: the versions whose checkpoint folder stays, and those whose optimizer state stays.
#
# Kept: versions that serve or may serve soon, versions that a trajectory is pinned to, the version that training
# continues from, the newest ones and the best ones. The optimizer state, most of a folder's bytes, stays with the
# newest and the best ones only. All other folders are deleted; their rows in the store stay.

_KEPT = (*SERVING, PolicyState.CANDIDATE)
_MIN_SCORES = 16  # of a version that is compared with others
_ROLLOUT_TIMEOUT = 3600.0  # seconds that a version is kept for a planned rollout that has not ended


def versions_in_use(store: Store, alias: str, now: float) -> set[int]:
    """Return the versions that a proxy has trajectories pinned to, or that planned rollouts of the tuner need."""
    proxies = store.proxy_instances.running(alias, now - PROXY_TIMEOUT_SECONDS)
    pins = [name.rpartition("@") for proxy in proxies for name, count in proxy.pinned_trajectories.items() if count]
    pinned = {int(version) for name, _, version in pins if name == alias}
    return pinned | store.rollouts.awaited_versions(alias, now - _ROLLOUT_TIMEOUT)


def retained(
    policies: Sequence[Policy], *, pinned: Collection[int], best: Sequence[int], newest: int, states: int
) -> tuple[Set[int], Set[int]]:
    """Return the versions whose folder stays, and those of them whose optimizer state stays: of the `newest` versions
    and of `states` of them, and of the `best` ones, the best first.
    """
    versions = sorted((policy.version for policy in policies if policy.version != BASE_VERSION), reverse=True)
    serving = {policy.version for policy in policies if policy.state in _KEPT}
    # Training continues from the newest version that is not rejected: it may be unproven, or the live one after a
    # rollback.
    trained = [policy.version for policy in policies if policy.state is not PolicyState.REJECTED and policy.round_id]
    with_state = {*versions[:states], *best[:states], *serving, *trained[-1:]}
    with_folder = {*versions[:newest], *serving, *pinned, *with_state}
    return _sharing(policies, with_folder), _sharing(policies, with_state)


def _sharing(policies: Sequence[Policy], versions: Set[int]) -> Set[int]:
    """Return these versions and those that share a folder with one, that is, differ by their prompt only."""
    folders = {policy.adapter for policy in policies if policy.version in versions and policy.adapter}
    return {*versions, *(policy.version for policy in policies if policy.adapter in folders)}


def best_first(scores: Sequence[PastScore]) -> list[int]:
    """Return the trained versions by the mean score of their trajectories, without those that have too few scores.

    Not for a judge that only ranks: its means do not compare versions.
    """
    by_version: dict[int, list[float]] = {}
    for scored in scores:
        if scored.version != BASE_VERSION:
            by_version.setdefault(scored.version, []).append(scored.score)
    means: Mapping[int, float] = {
        version: fmean(values) for version, values in by_version.items() if len(values) >= _MIN_SCORES
    }
    return sorted(means, key=lambda version: (means[version], version), reverse=True)
