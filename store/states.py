"""The states of all records, and the allowed transitions.

Every change of state calls `check_transition`, or puts `states_before` into the WHERE clause of its UPDATE.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from ratchet.store.errors import InvalidTransition


class CallState(StrEnum):
    """States of a request to the proxy."""

    STARTED = "started"  # forwarded; its end is not recorded yet
    ANSWERED = "answered"  # the client received the whole answer
    REFUSED = "refused"  # the upstream refused the request; the same request would be refused again
    FAILED = "failed"  # the engine, its server or the proxy failed before the answer was whole
    ABORTED = "aborted"  # the client disconnected; holds the part that was generated
    INTERRUPTED = "interrupted"  # the proxy died before the end; only the start is known


CUT_OFF = (CallState.STARTED, CallState.FAILED, CallState.INTERRUPTED)  # ended by a machine, not by policy or client
UNANSWERED = (CallState.FAILED, CallState.ABORTED, CallState.INTERRUPTED)  # whose client may send them again


class TrajectoryState(StrEnum):
    OPEN = "open"  # further calls may come
    SEALED = "sealed"  # complete; waits for a group; reopens if it was only idle and a call comes
    GROUPED = "grouped"  # member of a group; waits for its verdict and its round
    TRAINED = "trained"  # its tokens are part of a committed round; never trained again
    DROPPED = "dropped"  # will not be trained; `drop_reason` says why


class GroupState(StrEnum):
    READY = "ready"  # complete; waits for the judge
    JUDGED = "judged"  # every member has a verdict with a score
    TRAINED = "trained"  # consumed by a committed round
    DROPPED = "dropped"  # will not be trained; `drop_reason` says why


class RoundState(StrEnum):
    """States of a training round."""

    STARTED = "started"  # in progress
    COMMITTED = "committed"  # checkpoint written, trajectories consumed, candidate registered, in one transaction
    ABANDONED = "abandoned"  # the trainer stopped before the commit; its groups wait for another round


class KeyScope(StrEnum):
    """What an API key may access."""

    AGENT = "agent"  # the routes of agents; no access to records
    OPERATOR = "operator"  # /api: all records


class PolicyState(StrEnum):
    """States of a version of an alias."""

    CANDIDATE = "candidate"  # on disk and registered; serves nobody
    RAMP = "ramp"  # serves its share of new trajectories beside the live version; at most one per alias
    LIVE = "live"  # serves all other new trajectories; at most one per alias
    HOLDBACK = "holdback"  # the anchor, older than the live version; serves its share; at most one per alias
    UNPROVEN = "unproven"  # changes too little for a proof to decide; serves nobody, training continues from it
    RETIRED = "retired"  # was live, or a newer version was released in its place; its open trajectories finish on it
    REJECTED = "rejected"  # failed its proof or evaluation, or was rolled back; training does not continue from it


SERVING = (PolicyState.HOLDBACK, PolicyState.LIVE, PolicyState.RAMP)  # states whose versions serve new trajectories


class PolicyAction(StrEnum):
    """Decisions about a version."""

    RAMP = "ramp"  # it gets a share of new trajectories
    SHARE = "share"  # its share of new trajectories is another one
    HOLD = "hold"  # only a person promotes it
    PROMOTE = "promote"  # it is live
    ANCHOR = "anchor"  # it is the version that later ones are compared with
    SKIP = "skip"  # a newer version is released in its place
    PIN = "pin"  # it serves all new trajectories until a person unpins it
    UNPIN = "unpin"  # the release goes on
    UNPROVEN = "unproven"  # its proof could not decide, and it serves nobody
    REJECT = "reject"  # it failed its proof or evaluation, or a newer one came first
    ROLLBACK = "rollback"  # it serves no new trajectory any more


class ToolOutcome(StrEnum):
    """The result of checking a sampled tool call against the tools of its request."""

    VALID = "valid"  # the tool exists and its arguments fit the tool's schema
    UNKNOWN_TOOL = "unknown_tool"  # the request offers no tool of that name
    INVALID_JSON = "invalid_json"  # the arguments are no JSON
    SCHEMA_VIOLATION = "schema_violation"  # an argument is missing or violates the schema
    UNEXPECTED_ARGUMENT = "unexpected_argument"  # valid except for an argument that the schema does not name
    UNCHECKED = "unchecked"  # the schema or the arguments cannot be checked; `detail` says why


class ToolResult(StrEnum):
    """The result of a tool call, from the agent's next request."""

    OK = "ok"  # no sign of a failure
    ERROR = "error"  # the tool failed or reported an error
    TIMEOUT = "timeout"  # the tool took too long
    EMPTY = "empty"  # the result is empty


class PromptMode(StrEnum):
    """How a prompt changes the system prompt of a call."""

    REPLACE = "replace"  # replaces it
    APPEND = "append"  # is appended to it


class TuningKind(StrEnum):
    """Kinds of runs of the tuner."""

    SELECT_MODEL = "select-model"  # find the best of several models or versions
    PROMPT = "prompt"  # find a better system prompt
    WEIGHTS = "weights"  # train better weights by reinforcement learning
    EVAL = "eval"  # measure only
    GATHER = "gather"  # gather groups of rollouts for `ratchet.train`
    TRAIN = "train"  # train groups that a caller scored
    LESSONS = "lessons"  # write lessons from failed rollouts
    DOCTOR = "doctor"  # check of a workflow; not a tuning method


class TuningState(StrEnum):
    """States of a run of the tuner."""

    RUNNING = "running"  # in progress, or interrupted: no process holds its lease (`Tunings.led`)
    DONE = "done"  # `result` is final
    FAILED = "failed"  # `error` says why
    STOPPED = "stopped"  # stopped by the user; may be resumed


RELEASE_EVALUATION = "release"  # key of the request of an `eval` run that the trainer runs, and resumes itself


class RolloutState(StrEnum):
    PLANNED = "planned"  # the proxy may serve it; it has no end yet
    ENDED = "ended"  # the workflow returned
    FAILED = "failed"  # the workflow failed; `failure` says why, and it counts as an attempt
    ABANDONED = "abandoned"  # its run ended first; later calls are recorded, never trained


class ResampleState(StrEnum):
    """States of a resample: a further answer to a recorded prompt."""

    PLANNED = "planned"  # not requested yet
    REQUESTED = "requested"  # in progress; also after its trainer was killed
    ANSWERED = "answered"  # recorded by the proxy, and shipped soon
    FAILED = "failed"  # not requested again; `failure` says why


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
        {PolicyState.RAMP, PolicyState.LIVE, PolicyState.UNPROVEN, PolicyState.RETIRED, PolicyState.REJECTED}
    ),
    PolicyState.UNPROVEN: frozenset({PolicyState.LIVE, PolicyState.REJECTED}),
    PolicyState.RAMP: frozenset({PolicyState.LIVE, PolicyState.RETIRED, PolicyState.REJECTED}),
    PolicyState.LIVE: frozenset({PolicyState.HOLDBACK, PolicyState.RETIRED, PolicyState.REJECTED}),
    PolicyState.HOLDBACK: frozenset({PolicyState.LIVE, PolicyState.RETIRED, PolicyState.REJECTED}),
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

IDLE = "idle"  # why a trajectory was sealed: it had no call for some time
FINISH = "finish"  # on request, or its rollout ended

_State = TypeVar("_State", bound=StrEnum)


def check_transition(steps: Mapping[_State, frozenset[_State]], old: _State, new: _State, what: str) -> None:
    """Raise InvalidTransition unless `old -> new` is in `steps`; `what` names the record in the message."""
    if new not in steps[old]:
        allowed = ", ".join(sorted(steps[old])) or "nothing"
        raise InvalidTransition(f"{what} is {old} and cannot become {new} (allowed from {old}: {allowed})")


def states_before(steps: Mapping[_State, frozenset[_State]], new: _State) -> tuple[_State, ...]:
    """Return the states from which `new` may be reached, for the WHERE clause of a change."""
    return tuple(state for state, reachable in steps.items() if new in reachable)
