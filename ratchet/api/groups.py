"""Groups of recorded rollouts with rewards: `gather` makes them, and only `train` trains them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ratchet.api.arguments import AnyJudge, AnyWorkflow, Tasks, read_arguments
from ratchet.api.context import judge_of, opened, run_services, workflow_of
from ratchet.api.run_lease import RunCaller, RunLease
from ratchet.api.runs import start, synchronous
from ratchet.errors import InvalidArgument, RunCancelled
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import RecordNotFound
from ratchet.store.operation_records import Rollout
from ratchet.store.reasons import DropReason
from ratchet.store.records import GATHERED, Group, Policy
from ratchet.store.states import GroupState, PolicyState, RolloutState
from ratchet.store.store import Store, open_store
from ratchet.supervisor.up import ProjectServices, attach_or_start, read_run_state
from ratchet.trainer.errors import TuningError
from ratchet.trainer.judges.kinds.given_scores import NO_REWARD
from ratchet.trainer.tasks import TRAIN, Task, content_id
from ratchet.tuner.rollouts.runner import RolloutJob, final_rollouts, pending_jobs
from ratchet.tuner.rollouts.scoring import NO_JUDGE
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.selection import commonest
from ratchet.tuner.weights.trajectory_groups import (
    Given,
    ScoredTrajectory,
    TrajectoryGroup,
    describe_left_out,
    hand_over,
    read_given,
)

Scenarios: TypeAlias = Iterable[Mapping[str, Any]] | Tasks
_GATHER = "gather"
_CANDIDATE = "gathered"


async def gather_async(
    workflow: AnyWorkflow | None = None,
    scenarios: Scenarios = (),
    judge: AnyJudge | None = None,
    *,
    attempts: int = 4,
    model: str | None = None,
    step: int = 0,
    concurrency: int | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> list[TrajectoryGroup]:
    """Run a workflow several times on each scenario, record and score the rollouts, and return a group for each.

    Nothing is trained before `ratchet.train(groups)`. A bar, or a line every 10 s, shows the progress. Also in a
    notebook; `gather_async` is for an event loop that runs already.

    scenarios  rows, which the workflow gets as `task`, or `ratchet.Tasks(...)`; equal rows are one scenario
    judge      a function, `module:function`, or the mapping of a judge's kind, such as
               `{"kind": "ruler", "base_url": ..., "model": ...}`; None: the project's, else the workflow's reward
    attempts   at each scenario: the group size
    model      a version, such as `policy@4`; None: the live one
    step       the number of the caller's step, stored with the rollouts
    resume     the id of a run that ended early, with the same workflow, scenarios and judge; or of a finished one,
               whose groups are returned: `group.run`

    The other arguments are those of `evaluate`. A failed rollout stays in its group, without a reward. Raises
    RatchetError: TooManyFailures if all of the first 16 rollouts failed; RunCancelled, which names the id to resume;
    WorkflowError, JudgeError, SettingsError.
    """
    arguments = locals() | {"attempts": None}  # not the setting, which is of evaluations
    if isinstance(scenarios, (str, Path, Mapping)):
        raise InvalidArgument(f"scenarios is {scenarios!r:.100}: give rows, or `ratchet.Tasks({scenarios!r:.60})`")
    rows = tuple(scenarios)
    _check_scenarios(rows, attempts, resume)
    given = read_arguments(arguments)
    tasks = _tasks(rows, scenarios.split if isinstance(scenarios, Tasks) else TRAIN)
    jobs = [
        RolloutJob(task, attempt, _CANDIDATE, model, GATHERED, step=step)
        for task in tasks
        for attempt in range(attempts)
    ]
    config_of_run = {"attempts": attempts, "model": model, "scenarios": len(rows), "step": step}

    def work(caller: RunCaller) -> None:
        check = partial(_check_usable, given.settings, caller)
        with run_services(given.settings, caller, (model or given.settings.model,), check):
            _gather(given.settings, jobs, config_of_run, resume, caller)

    run = await (await start(given, _GATHER, resume, work))
    with open_store(given.settings.store_url, create=False) as store:
        return _gathered(store, run.id)


gather = synchronous(gather_async)


def _check_scenarios(rows: Sequence[Mapping[str, Any]], attempts: int, resume: str | None) -> None:
    """Raise InvalidArgument, which names the argument."""
    if not rows and resume is None:
        raise InvalidArgument("scenarios is empty: give one or more rows, such as [{'question': ...}]")
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise InvalidArgument(f"scenarios holds {wrong[0]!r:.100}: give rows, such as {{'question': ...}}")
    for number, row in enumerate(rows):
        try:
            json.dumps(row, ensure_ascii=False, default=str, skipkeys=True).encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"scenarios[{number}] holds half of a surrogate pair ({error.object[error.start]!a}), which is no "
                "text: write the whole pair, or leave it out"
            ) from error
    if attempts < 2:
        raise InvalidArgument(f"attempts is {attempts}: the rewards of a group are compared, so give 2 or more")


def _tasks(rows: Sequence[Mapping[str, Any]], split: str) -> list[Task]:
    """Return each different scenario once, as a task."""
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows, 1):
        name = content_id(row)
        tasks.setdefault(name, Task(name, dict(row), split, number, _CANDIDATE))
    return list(tasks.values())


def _check_usable(settings: Settings, caller: RunCaller) -> None:
    """Load workflow and judge, before anything is started."""
    load_workflow(workflow_of(settings, caller))
    with judge_of(settings, caller.judge):
        pass


def _gather(
    settings: Settings, jobs: Sequence[RolloutJob], config: Mapping[str, Any], resume: str | None, caller: RunCaller
) -> None:
    """Run and score the rollouts that are missing. Raises TuningError, TooManyFailures, and what `opened` does."""
    with opened(settings, caller) as context:
        store = context.store
        name = resume or store.tunings.begin(_GATHER, settings.model, {"workflow": context.workflow, **config}).id
        with context.lease.acquire(name, resume=resume is not None) as run:
            if missing := pending_jobs(jobs, store.rollouts.of_tuning(run.id)):
                asyncio.run(context.runner.run(missing, run.id))
            made = final_rollouts(store.rollouts.of_tuning(run.id), jobs)
            explanations: dict[str, str] = {}
            scored = context.scorer.score(
                made, lambda verdict: explanations.update({verdict.trajectory_id: verdict.explanation})
            )
            failures = [one.judge_failure for one in scored if one.state is RolloutState.ENDED]
            # A workflow without a reward leaves the scores to the caller.
            if failures and None not in failures and not {NO_JUDGE, NO_REWARD} & set(failures):
                raise TuningError(f"no rollout could be scored: {commonest(failures)}")
            store.tunings.end(
                run.id, "done", {"rollouts": [one.id for one in made], "explanations": explanations}
            )  # fmt: skip


def _gathered(store: Store, run: str) -> list[TrajectoryGroup]:
    """Return the groups of a finished run, in the order of its scenarios."""
    result = store.tunings.get(run).result or {}
    wanted = {name: place for place, name in enumerate(result["rollouts"])}
    by_task: dict[str, list[Rollout]] = {}
    found = [one for one in store.rollouts.of_tuning(run, responses=True) if one.id in wanted]
    for one in sorted(found, key=lambda one: wanted[one.id]):
        by_task.setdefault(one.task_id, []).append(one)
    groups = []
    for task, rollouts in by_task.items():
        row = store.tasks.get(task)
        members = [_trajectory(store, one, result["explanations"].get(one.id, "")) for one in rollouts]
        groups.append(TrajectoryGroup(tuple(members), {} if row is None else row.content, run))
    return groups


def _trajectory(store: Store, one: Rollout, explanation: str) -> ScoredTrajectory:
    try:
        messages = store.trajectories.read(one.id, tokens=False).messages
    except RecordNotFound:  # no call reached the proxy
        messages = ()
    return ScoredTrajectory(
        reward=one.score, id=one.id, messages=messages, metrics=one.metrics, explanation=explanation,
        response=None if one.response is None else json.loads(one.response),
        failure=one.failure or one.judge_failure,
    )  # fmt: skip


_TRAIN = "train"
_POLL = 0.1  # seconds
_SERVED_WITHIN = 30.0  # seconds, for the proxies to serve a version that is live


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """The result of `ratchet.train`.

    name          the version, such as `policy@3`
    state         live; unproven: its proof is undecided, and the next step continues from it; rejected: its
                  proof failed; ramp: the settings say `release.policy: guarded`, and live traffic decides; candidate:
                  it waits for a person
    groups        number of groups that were trained
    trajectories  number of trajectories that were trained
    left_out      trajectories that were not trained, by reason
    metrics       of the round: loss, tokens_trained, reward and others
    """

    name: str
    state: str
    groups: int
    trajectories: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


async def train_async(
    groups: Sequence[TrajectoryGroup],
    *,
    timeout: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> TrainedVersion:
    """Train on groups with rewards, and return when the new version is live. Also in a notebook.

    It uses the running project; if none runs, vLLM, proxy and trainer are started for the call and stopped at its end
    (for a loop, see `ratchet.services`). The trainer's judge is not called: the rewards are the scores. A round
    starts at once, with at most `trainer.groups_per_round` groups; further ones make further rounds. `train_async` is
    for an event loop that runs already.

    groups   what `gather` returned, or groups of imported trajectories: token ids with logprobs, and rewards
    timeout  seconds; None: no limit

    The other arguments are those of `evaluate`. A call that ended early is repeated with the same groups, also after a
    restart of the kernel: those that the trainer has already are waited for. Trajectories without a reward, and groups
    whose rewards are equal, are left out. Raises TuningError if nothing is left, if a trajectory is malformed or was
    trained before, or if the trainer dropped all groups; TimeoutError, with the trainer going on; CliError if the
    services cannot be started.
    """
    arguments = locals()
    chosen = read_given(groups)
    given = read_arguments(arguments)
    settings = _with_trainer(given.settings)

    def work(caller: RunCaller) -> None:
        with _services(settings, caller) as running:
            _train(settings, chosen, timeout, caller, running.check)

    try:
        run = await (await start(given, _TRAIN, None, work))
    except RunCancelled as cancelled:
        raise RunCancelled(
            "the call was cancelled; a running project goes on: call it again with the same groups"
        ) from cancelled
    with open_store(settings.store_url, create=False) as store:
        result = dict(store.tunings.get(run.id).result or {})
    return TrainedVersion(name=f"{settings.model}@{result.pop('version')}", **result)


train = synchronous(train_async)


@contextmanager
def services(
    *,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> Iterator[str]:
    """Use the running project for a `with` block, or start vLLM, proxy and trainer for it; yield the base URL.

    Use it around a loop of `gather` and `train`, to start them once. The arguments are those of `train`. Raises
    CliError if they cannot be started.
    """
    with _services(_with_trainer(read_arguments(locals()).settings), RunCaller()) as running:
        yield running.base_url


@contextmanager
def _services(settings: Settings, caller: RunCaller) -> Iterator[ProjectServices]:
    """Yield the services of the project; if its proxy is elsewhere, so is its trainer."""
    if url := settings.tuner.proxy_url:
        yield ProjectServices(f"{url.removesuffix('/v1')}/v1", caller.check)
        return
    with attach_or_start(settings, print_note, caller.check) as running:
        yield running


def _with_trainer(settings: Settings) -> Settings:
    """Return settings with which a trainer starts: it needs a judge, though rewards are given here.

    Services that run elsewhere (tuner.proxy_url) are left to themselves.

    Raises InvalidArgument if nothing runs and no base model is set, or if the running project trains nothing.
    """
    running = read_run_state(settings.state)
    if settings.tuner.proxy_url:
        return settings
    if running and "trainer" not in running.get("services", {}):
        raise InvalidArgument(
            f"project {settings.project} runs without a trainer: set trainer.judge in ratchet.yaml ({{kind: workflow}} "
            "if rewards are given in Python) and restart it, or stop it so that services are started for this call"
        )
    if not running and settings.base_model is None:
        raise InvalidArgument(
            f"project {settings.project} does not run: start it with `ratchet up`, or give base_model= to start it for "
            "this call"
        )
    if settings.has_judge:
        return settings
    return settings.changed(trainer={"judge": {"kind": "workflow"}})


def _train(
    settings: Settings, given: Given, timeout: float | None, caller: RunCaller, check: Callable[[], None]
) -> None:
    """Train and wait; the result is stored with the run. `check` raises once the services have ended.

    Raises TuningError: the groups cannot be trained, or were dropped.
    """
    alias = settings.model
    with open_store(settings.store_url) as store:
        config = {"groups": len(given.groups), "trajectories": sum(len(members) for _, members in given.groups)}
        lease = RunLease(store, caller)
        with lease.acquire(store.tunings.begin(_TRAIN, alias, config).id, resumable=False) as run:
            groups = hand_over(store, alias, run.id, given)
            if left_out := describe_left_out(given.left_out):
                print_note(f"not trained: {left_out}")
            wait = _Wait(store, timeout, lease.check, check)
            version = _version_of(wait, alias, groups)
            release = settings.trainer.release
            immediate = "policy" not in release.model_fields_set or release.policy == "immediate"
            policy = _decided(wait, version, immediate=immediate)
            store.tunings.end(run.id, "done", _result(store, policy, groups, given.left_out))


class _Wait:
    """Waits for the trainer; tells of its alarms, and stops if the caller cancels or a service ends."""

    def __init__(self, store: Store, timeout: float | None, *checks: Callable[[], None]) -> None:
        self.store = store
        self._until = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._checks = checks
        self._began = time.time()
        self._known: set[str] = set()

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Return once `holds` returns true. Raises TimeoutError."""
        while not holds():
            for check in self._checks:
                check()
            for alarm in self.store.alarms.active():
                if alarm.last_raised_at >= self._began and alarm.name not in self._known:
                    self._known.add(alarm.name)
                    print_note(f"alarm {alarm.name}: {alarm.reason}")
            if self._until is not None and time.monotonic() > self._until:
                raise TimeoutError(
                    f"not within {self._timeout:g} s: {what}; the trainer goes on: call it again with the same groups"
                )
            time.sleep(_POLL)


def _version_of(wait: _Wait, alias: str, groups: Sequence[str]) -> Policy:
    """Wait until the groups are trained; return the newest version. Raises TuningError if all were dropped."""
    closed: dict[str, Group] = {}

    def all_closed() -> bool:
        for name in groups:
            if name not in closed and (found := wait.store.groups.get(name)).state is not GroupState.JUDGED:
                closed[name] = found
        return len(closed) == len(groups)

    wait.until("the training of the groups", all_closed)
    rounds = {
        wait.store.trajectories.get(one.members[0]).round_id
        for one in closed.values()
        if one.state is GroupState.TRAINED and one.members
    }
    versions = [wait.store.rounds.get(name).to_version for name in rounds if name is not None]
    if not versions:
        reasons = sorted({_meaning(one.drop_reason) for one in closed.values()})
        raise TuningError(f"no group was trained: {'; '.join(reasons)}")
    return wait.store.policies.get(alias, max(version for version in versions if version is not None))


def _meaning(reason: str | None) -> str:
    return next((f"{one}: {one.meaning}" for one in DropReason if one == reason), str(reason))


def _decided(wait: _Wait, policy: Policy, *, immediate: bool) -> Policy:
    """Wait until a version is live, or will not become live without traffic or a person; return it.

    Of a live one, also wait, for a limited time, until every proxy starts trajectories on it.
    """
    alias, version, policies = policy.alias, policy.version, wait.store.policies
    passing = {PolicyState.CANDIDATE, *((PolicyState.RAMP,) if immediate else ())}

    def decided() -> bool:
        if policies.get(alias, version).state not in passing:
            return True
        held = policies.awaiting_approval(alias)
        return held is not None and held.version == version

    wait.until(f"the release of {alias}@{version}", decided)
    found = policies.get(alias, version)
    until = time.monotonic() + _SERVED_WITHIN

    def served() -> bool:
        proxies = wait.store.proxy_instances.running(alias, time.time() - PROXY_TIMEOUT_SECONDS)
        behind = any(one.live_versions[alias] < version for one in proxies)
        return not behind or time.monotonic() > until

    if found.state is PolicyState.LIVE:
        wait.until(f"{alias}@{version} in every proxy", served)
    return found


def _result(store: Store, policy: Policy, groups: Sequence[str], left_out: Mapping[str, int]) -> dict[str, Any]:
    found = [store.groups.get(name) for name in groups]
    trained = [one for one in found if one.state is GroupState.TRAINED]
    reasons = dict(left_out)
    for one in found:
        if one.state is GroupState.DROPPED:
            reasons[str(one.drop_reason)] = reasons.get(str(one.drop_reason), 0) + len(one.members)
    metrics = {} if policy.round_id is None else store.rounds.get(policy.round_id).metrics
    return {
        "version": policy.version, "state": str(policy.state), "groups": len(trained),
        "trajectories": sum(len(one.members) for one in trained), "left_out": reasons, "metrics": metrics,
    }  # fmt: skip
