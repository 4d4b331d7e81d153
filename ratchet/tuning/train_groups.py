"""Train groups that a caller scored: hand them to the running trainer, and wait for the version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.supervisor.up import read_run_state
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.context import open_store
from ratchet.tuning.run_lease import RunLease

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.records import Group, Policy
    from ratchet.store.store import Store
    from ratchet.tuner.weights.given_groups import Given

KIND = "train"
_POLL = 0.1  # seconds
_SERVED_WITHIN = 30.0  # seconds, for the proxies to serve a version that is live


def with_trainer(settings: Settings) -> Settings:
    """Return settings with which a trainer starts: it needs a judge, though rewards are given here.

    Services that run elsewhere (tuner.proxy_url) are left to themselves.

    Raises InvalidArgument if nothing runs and no base model is set, or if the running project trains nothing.
    """
    running = read_run_state(settings.state)
    if settings.tuner_settings().proxy_url:
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
    return settings.model_copy(update={"trainer": {**settings.trainer, "judge": {"kind": "workflow"}}})


def train(
    settings: Settings, given: Given, timeout: float | None, caller: RunCaller, check: Callable[[], None]
) -> None:
    """Train and wait; the result is stored with the run. `check` raises once the services have ended.

    Raises TuningError: the groups cannot be trained, or were dropped.
    """
    from ratchet.tuner.weights.given_groups import describe_left_out, hand_over

    alias = settings.model
    with open_store(settings.store_url) as store:
        config = {"groups": len(given.groups), "trajectories": sum(len(members) for _, members in given.groups)}
        lease = RunLease(store, caller)
        with lease.acquire(store.tunings.begin(KIND, alias, config).id, resumable=False) as run:
            groups = hand_over(store, alias, run.id, given)
            if left_out := describe_left_out(given.left_out):
                print_note(f"not trained: {left_out}")
            wait = _Wait(store, alias, timeout, lease.check, check)
            policy = _version_of(wait, groups)
            immediate = (settings.trainer.get("release") or {}).get("policy") != "guarded"
            policy = _decided(wait, policy, immediate=immediate)
            store.tunings.end(run.id, "done", _result(store, policy, groups, given.left_out))


class _Wait:
    """Waits for the trainer; tells of its alarms, and stops if the caller cancels or a service ends."""

    def __init__(self, store: Store, alias: str, timeout: float | None, *checks: Callable[[], None]) -> None:
        self.store, self.alias = store, alias
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


def _version_of(wait: _Wait, groups: Sequence[str]) -> Policy:
    """Wait until the groups are trained; return the newest version. Raises TuningError if all were dropped."""
    from ratchet.store.states import GroupState
    from ratchet.trainer.errors import TuningError

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
    return wait.store.policies.get(wait.alias, max(version for version in versions if version is not None))


def _meaning(reason: str | None) -> str:
    from ratchet.store.reasons import DropReason

    return next((f"{one}: {one.meaning}" for one in DropReason if one == reason), str(reason))


def _decided(wait: _Wait, policy: Policy, *, immediate: bool) -> Policy:
    """Wait until a version is live, or will not become live without traffic or a person; return it."""
    from ratchet.store.states import PolicyState

    passing = {PolicyState.CANDIDATE, *((PolicyState.RAMP,) if immediate else ())}
    policies = wait.store.policies

    def decided() -> bool:
        if policies.get(policy.alias, policy.version).state not in passing:
            return True
        held = policies.awaiting_approval(policy.alias)
        return held is not None and held.version == policy.version

    wait.until(f"the release of {policy.alias}@{policy.version}", decided)
    found = policies.get(policy.alias, policy.version)
    if found.state is PolicyState.LIVE:
        _wait_until_served(wait, found)
    return found


def _wait_until_served(wait: _Wait, policy: Policy) -> None:
    """Wait, for a limited time, until every proxy starts trajectories on the version."""
    from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS

    until = time.monotonic() + _SERVED_WITHIN

    def served() -> bool:
        proxies = wait.store.proxy_instances.running(policy.alias, time.time() - PROXY_TIMEOUT_SECONDS)
        behind = any(one.live_versions[policy.alias] < policy.version for one in proxies)
        return not behind or time.monotonic() > until

    wait.until(f"{policy.alias}@{policy.version} in every proxy", served)


def _result(store: Store, policy: Policy, groups: Sequence[str], left_out: Mapping[str, int]) -> dict[str, Any]:
    from ratchet.store.states import GroupState

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
