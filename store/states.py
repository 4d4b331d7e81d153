"""Every state of every record, in one sentence each, with the steps that are allowed between them.

`check` is the single gate: verbs call it (or put the allowed origins into their UPDATE) before they write.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from ratchet.store.errors import InvalidTransition


class CallState(StrEnum):
    """The life of one request to the proxy."""

    STARTED = "started"  # forwarded; its end has not been seen yet
    ANSWERED = "answered"  # the client got the whole answer
    FAILED = "failed"  # the upstream or the proxy answered with an error
    ABORTED = "aborted"  # the client left before the end; holds what was generated
    INTERRUPTED = "interrupted"  # the proxy died in between; only its beginning is known


class TrajectoryState(StrEnum):
    """The life of one agent run, as the trainer sees it."""

    OPEN = "open"  # more calls may come
    SEALED = "sealed"  # complete; waits for a group; opens again if it was only still and a call comes after all
    GROUPED = "grouped"  # member of a group; waits for its verdict and its round
    TRAINED = "trained"  # its tokens are part of a committed round; never again trained
    DROPPED = "dropped"  # will not be trained; `drop_reason` says why


class GroupState(StrEnum):
    """The life of a set of trajectories that are compared with each other."""

    READY = "ready"  # complete; waits for the judge
    JUDGED = "judged"  # every member has a verdict that counts
    TRAINED = "trained"  # consumed by a committed round
    DROPPED = "dropped"  # will not be trained; `drop_reason` says why


class RoundState(StrEnum):
    """The life of one training round: some groups, some optimiser steps, one new version."""

    STARTED = "started"  # rows are being trained; nothing is decided
    COMMITTED = "committed"  # checkpoint written, trajectories consumed, candidate registered: one transaction
    ABANDONED = "abandoned"  # the trainer stopped before the commit; its groups wait for another round


class KeyScope(StrEnum):
    """What an API key opens."""

    AGENT = "agent"  # the routes that agents use; it reads nothing back
    OPERATOR = "operator"  # /api: what was recorded, judged and trained


class PolicyState(StrEnum):
    """The life of one adapter version of an alias."""

    CANDIDATE = "candidate"  # on disk and registered; serves nobody
    CANARY = "canary"  # serves a share of new trajectories
    LIVE = "live"  # serves all other new trajectories; at most one per alias
    UNPROVEN = "unproven"  # changes too little for a proof to decide; serves nobody, training goes on from it
    RETIRED = "retired"  # was live; still addressable while its trajectories finish
    REJECTED = "rejected"  # failed its proof or its gate, or was taken back; nothing is trained on top of it


class PolicyAction(StrEnum):
    """What was decided about a version."""

    CANARY = "canary"  # it gets a share of new trajectories
    HOLD = "hold"  # only a person promotes it
    PROMOTE = "promote"  # it is live
    UNPROVEN = "unproven"  # its proof could not decide, and it serves nobody
    REJECT = "reject"  # it did not pass its proof, or a newer one came first
    ROLLBACK = "rollback"  # it served, and serves no new trajectory any more


class ToolOutcome(StrEnum):
    """What a sampled tool call is, held against the tools of its own request."""

    VALID = "valid"  # the tool exists and its arguments fit the tool's schema
    UNKNOWN_TOOL = "unknown_tool"  # the request offers no tool of that name
    INVALID_JSON = "invalid_json"  # the arguments are no JSON
    SCHEMA_VIOLATION = "schema_violation"  # an argument is missing or not what the schema says
    UNEXPECTED_ARGUMENT = "unexpected_argument"  # all fits, but an argument is there that the schema does not name
    UNCHECKED = "unchecked"  # the schema or the arguments cannot be checked; `detail` says why


class ToolResult(StrEnum):
    """What the agent's next request says came of a tool call."""

    OK = "ok"  # a result that tells of no failure
    ERROR = "error"  # the tool failed, or says so
    TIMEOUT = "timeout"  # the tool took too long
    EMPTY = "empty"  # the result holds nothing


class PromptMode(StrEnum):
    """What a prompt does to the system prompt of a call."""

    REPLACE = "replace"  # takes its place
    APPEND = "append"  # stands after it


class TuningKind(StrEnum):
    """What a run of the tuner is for."""

    SELECT_MODEL = "select-model"  # which of several models or versions is best
    PROMPT = "prompt"  # a better system prompt
    WEIGHTS = "weights"  # better weights, by reinforcement learning
    EVAL = "eval"  # only to measure
    LESSONS = "lessons"  # lessons from what failed
    DOCTOR = "doctor"  # a look at a workflow: no run of a method


class TuningState(StrEnum):
    """The life of one run of the tuner."""

    RUNNING = "running"  # rollouts are made; also what a killed process leaves
    DONE = "done"  # `result` is its last word
    FAILED = "failed"  # `error` says why
    STOPPED = "stopped"  # somebody stopped it; it may go on


class RolloutState(StrEnum):
    """The life of one attempt of a workflow at a task."""

    PLANNED = "planned"  # the proxy may serve it; its end is not known
    ENDED = "ended"  # the workflow returned
    FAILED = "failed"  # it did not; `failure` says why, and it counts as an attempt
    ABANDONED = "abandoned"  # whoever was to make it is gone; what it still calls is its own, and nothing learns of it


class ResampleState(StrEnum):
    """The life of a further answer to a recorded prompt, for the original to be compared with."""

    PLANNED = "planned"  # nobody has asked for it yet
    REQUESTED = "requested"  # on its way; also what a killed trainer leaves
    ANSWERED = "answered"  # the proxy has recorded it, or is about to ship it
    FAILED = "failed"  # it will not be asked for again; `failure` says why


TRAJECTORY_TRANSITIONS: Mapping[TrajectoryState, frozenset[TrajectoryState]] = {
    TrajectoryState.OPEN: frozenset({TrajectoryState.SEALED}),
    TrajectoryState.SEALED: frozenset({TrajectoryState.OPEN, TrajectoryState.GROUPED, TrajectoryState.DROPPED}),
    TrajectoryState.GROUPED: frozenset({TrajectoryState.TRAINED, TrajectoryState.DROPPED}),
    TrajectoryState.TRAINED: frozenset(),
    TrajectoryState.DROPPED: frozenset(),
}

GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.READY: frozenset({GroupState.JUDGED, GroupState.DROPPED}),
    GroupState.JUDGED: frozenset({GroupState.TRAINED, GroupState.DROPPED}),
    GroupState.TRAINED: frozenset(),
    GroupState.DROPPED: frozenset(),
}

ROUND_TRANSITIONS: Mapping[RoundState, frozenset[RoundState]] = {
    RoundState.STARTED: frozenset({RoundState.COMMITTED, RoundState.ABANDONED}),
    RoundState.COMMITTED: frozenset(),
    RoundState.ABANDONED: frozenset(),
}

POLICY_TRANSITIONS: Mapping[PolicyState, frozenset[PolicyState]] = {
    PolicyState.CANDIDATE: frozenset(
        {PolicyState.CANARY, PolicyState.LIVE, PolicyState.UNPROVEN, PolicyState.REJECTED}
    ),
    PolicyState.UNPROVEN: frozenset({PolicyState.LIVE, PolicyState.REJECTED}),
    PolicyState.CANARY: frozenset({PolicyState.LIVE, PolicyState.REJECTED}),
    PolicyState.LIVE: frozenset({PolicyState.RETIRED, PolicyState.REJECTED}),
    PolicyState.RETIRED: frozenset({PolicyState.LIVE, PolicyState.REJECTED}),
    PolicyState.REJECTED: frozenset({PolicyState.LIVE}),
}

TUNING_TRANSITIONS: Mapping[TuningState, frozenset[TuningState]] = {
    TuningState.RUNNING: frozenset({TuningState.DONE, TuningState.FAILED, TuningState.STOPPED}),
    TuningState.DONE: frozenset(),
    TuningState.FAILED: frozenset({TuningState.RUNNING}),
    TuningState.STOPPED: frozenset({TuningState.RUNNING}),
}

ROLLOUT_TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.PLANNED: frozenset({RolloutState.ENDED, RolloutState.FAILED, RolloutState.ABANDONED}),
    RolloutState.ENDED: frozenset(),
    RolloutState.FAILED: frozenset(),
    RolloutState.ABANDONED: frozenset(),
}

RESAMPLE_TRANSITIONS: Mapping[ResampleState, frozenset[ResampleState]] = {
    ResampleState.PLANNED: frozenset({ResampleState.REQUESTED, ResampleState.FAILED}),
    ResampleState.REQUESTED: frozenset({ResampleState.ANSWERED, ResampleState.FAILED}),
    ResampleState.ANSWERED: frozenset(),
    ResampleState.FAILED: frozenset(),
}

_State = TypeVar("_State", bound=StrEnum)


def check_transition(steps: Mapping[_State, frozenset[_State]], old: _State, new: _State, what: str) -> None:
    """Raise InvalidTransition unless `old -> new` is in `steps`; `what` names the record in the message."""
    if new not in steps[old]:
        allowed = ", ".join(sorted(steps[old])) or "nothing"
        raise InvalidTransition(f"{what} is {old} and cannot become {new} (allowed from {old}: {allowed})")


def states_before(steps: Mapping[_State, frozenset[_State]], new: _State) -> tuple[_State, ...]:
    """Return the states from which `new` may be reached, for the WHERE clause of a change."""
    return tuple(state for state, reachable in steps.items() if new in reachable)
