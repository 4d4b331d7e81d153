"""The frozen records that components exchange: what the proxy ships, and what the trainer and the API read.

Token ids are packed int32, logprobs packed float32, both little-endian. Times are Unix seconds (float, UTC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.store.records.base import Record
from ratchet.store.records.encoding import pack_ids as pack_ids
from ratchet.store.records.encoding import pack_logprobs as pack_logprobs
from ratchet.store.records.encoding import unpack_halves as unpack_halves
from ratchet.store.records.encoding import unpack_ids as unpack_ids
from ratchet.store.records.encoding import unpack_logprobs as unpack_logprobs
from ratchet.store.records.releases import ReleaseEvidence as ReleaseEvidence
from ratchet.store.records.releases import ReleaseOutcome as ReleaseOutcome
from ratchet.store.records.releases import VersionDraw as VersionDraw
from ratchet.store.records.training import REQUESTED as REQUESTED
from ratchet.store.records.training import AnswerLogprobs as AnswerLogprobs
from ratchet.store.records.training import AnswerTraining as AnswerTraining
from ratchet.store.records.training import Group as Group
from ratchet.store.records.training import JudgeRequest as JudgeRequest
from ratchet.store.records.training import PastScore as PastScore
from ratchet.store.records.training import Round as Round
from ratchet.store.records.training import Tally as Tally
from ratchet.store.records.training import TeacherScore as TeacherScore
from ratchet.store.records.training import Verdict as Verdict
from ratchet.store.states import CallState, KeyScope, PolicyState, TrajectoryState

if TYPE_CHECKING:
    from ratchet.store.records.tool_calls import ToolCall

BASE_VERSION = 0  # version 0 of every alias is the base model without an adapter
REDACTED = "redacted"  # why a call with redacted content is untrainable
OTHER = "other_model"  # purpose of calls to a model that is not trained here
TOOL_GRAMMAR = "tool_grammar"  # sampling parameter: vLLM constrained the tool calls with a grammar
MOVED = "moved"  # purpose of the rest of a trajectory whose version was rolled back at once: never trained
UNLINKED = "unlinked"  # purpose of a trajectory that began while calls of other workers were unknown: never trained
GATHERED = "gathered"  # purpose of a trajectory that is grouped, scored and trained on request only
RESAMPLE = "resample"  # purpose of a further answer to a recorded prompt: trained with it, not counted as traffic


class MessageNode(Record, frozen=True):
    """A message and its position: `hash` covers it and all messages before it; `body` is canonical JSON."""

    hash: str
    parent: str
    role: str
    body: bytes


class CallStarted(Record, frozen=True, tag="started"):
    """A call at its arrival: identity, policy and sampling parameters, which never change."""

    call_id: str
    trajectory_id: str
    started_at: float
    alias: str
    version: int
    dialect: str  # chat, completions, responses, messages
    streamed: bool
    linked_by: str  # how the trajectory was found; see docs/linking.md
    prompt_node: (
        str  # hash of the last message of the prompt; a text completion's prompt is one message of the role "prompt"
    )
    tools_hash: str = ""
    parent_call: str | None = None
    parent_choice: int = 0
    key_id: str | None = None
    task: str | None = None
    role: str | None = None
    tags: tuple[str, ...] = ()
    purpose: str = "live"  # live, resample, gathered: may be trained; eval (a version by name) and all others: never
    sampling: Mapping[str, Any] = {}  # sampling parameters of the request, e.g. temperature, top_p, seed
    nodes: tuple[MessageNode, ...] = ()  # messages of the prompt that this proxy has not shipped before
    tools: bytes = b""  # canonical JSON of the tool list, if not shipped before
    draw: VersionDraw | None = None  # of the trajectory's version, if this call drew it

    @property
    def policy(self) -> str:
        """The model that answered: `alias@version`, or the name of a model that is not trained here."""
        return self.alias if self.purpose == OTHER else f"{self.alias}@{self.version}"


class Choice(Record, frozen=True):
    """One sampled answer, with the engine's own `token_ids` (n int32) and `logprobs` (n float32)."""

    index: int
    finish_reason: str | None
    token_ids: bytes
    logprobs: bytes
    reply_node: str = ""
    link_key: str = ""
    tool_call_ids: tuple[str, ...] = ()
    skip_last_key: str | None = None  # its key without the prompt's last message, if that may be a reminder


class CallEnded(Record, frozen=True, tag="ended"):
    """A call's end. `start` repeats the start, so that this record alone is enough for the row; in the journal without
    messages and tools, which are in the start's own record.

    `prompt_ids` depends on `context`: `root` and `fork` hold the whole prompt, `exact` only the tokens after the
    parent's prompt and completion, with which this prompt begins, id for id.
    """

    start: CallStarted
    state: CallState
    ended_at: float
    status: int
    context: str = "root"  # root, exact, fork
    prompt_ids: bytes = b""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_byte_at: float | None = None
    choices: tuple[Choice, ...] = ()
    untrainable: str | None = None  # why no token of this call is trained, e.g. "no_token_ids", "image", "echo"
    error: str | None = None
    upstream: str | None = None
    nodes: tuple[MessageNode, ...] = ()  # the answers
    response_id: str | None = None  # the engine's id in the response, unless it is derived from the call id


class Feedback(Record, frozen=True, tag="feedback"):
    """Feedback on an answer or a trajectory. Only its assignment and `applied_at` change.

    `trajectory_id` and `call_id` are set when its `target` is stored.
    """

    id: str
    kind: str  # what `target` names: trajectory, call, response
    target: str
    source: str  # end user, else the key; later feedback of the same source is a revision
    given_at: float
    key_id: str | None = None  # the target must belong to this key
    trusted: bool = False  # from an operator: any target
    value: float | None = None  # higher is better; None: only a comment or demonstration
    comment: str = ""
    demonstration: str | None = None  # the correct answer
    trajectory_id: str | None = None
    call_id: str | None = None  # None: on the whole trajectory
    applied_at: float | None = None  # when a verdict first used it


CallRecord = CallStarted | CallEnded
Shipment = CallStarted | CallEnded | Feedback


class OpenLeaf(Record, frozen=True):
    """An answer that a request may continue, for the linking state of a restarted proxy."""

    trajectory_id: str
    call_id: str
    choice: int
    alias: str
    version: int
    link_key: str
    tool_call_ids: tuple[str, ...]
    key_id: str | None
    purpose: str
    sequence: bytes  # token ids of the context and the answer (int32)
    last_active_at: float
    family: str | None = None  # of the trajectory
    extended: bool = False  # a later call continues it
    reply: bytes = b""  # the answer as canonical JSON
    skip_last_key: str | None = None
    prompt_messages: tuple[bytes, ...] = ()  # first prompt message of the trajectory, and the one answered, as JSON


class UnansweredCall(Record, frozen=True):
    """An unanswered call of an open trajectory, for the linking state of a restarted proxy."""

    trajectory_id: str
    alias: str
    version: int
    purpose: str
    key_id: str | None
    prompt_node: str
    tools_hash: str
    linked_by: str
    parent_call: str | None
    parent_choice: int
    ended_at: float
    last_active_at: float  # of its trajectory
    family: str | None = None  # likewise


class ProxyInstance(Record, frozen=True):
    """The state of one proxy: the versions that it serves and the trajectories pinned to each."""

    id: str
    url: str
    live_versions: Mapping[str, int]  # alias -> version of new trajectories
    pinned_trajectories: Mapping[str, int]  # "alias@version" -> open trajectories pinned to it
    shipped_until: float  # its records up to this time are in the store
    heartbeat_at: float


class Call(Record, frozen=True):
    """A recorded call with its tokens."""

    id: str
    trajectory_id: str
    state: CallState
    alias: str
    version: int
    dialect: str
    streamed: bool
    linked_by: str
    parent_call: str | None
    parent_choice: int
    role: str | None
    sampling: Mapping[str, Any]
    prompt_node: str
    tools_hash: str
    context: str
    prompt_ids: bytes
    prompt_tokens: int
    completion_tokens: int
    started_at: float
    first_byte_at: float | None
    ended_at: float | None
    status: int | None
    untrainable: str | None
    error: str | None
    choices: tuple[Choice, ...]
    response_id: str | None = None


def cohort_of(task: str | None, root_node: str, tools_hash: str) -> str:
    """Return the key that attempts at one task share: the task, else the root prompt and tools."""
    return f"task:{task}" if task else f"root:{root_node}:{tools_hash}"


def family_of(task: str | None, tools_hash: str) -> str:
    """Return the family of a task: `math` of `math/17`; without a task, the tools."""
    return f"task:{task.rpartition('/')[0]}" if task else f"tools:{tools_hash}"


class Trajectory(Record, frozen=True):
    """A trajectory without its content."""

    id: str
    alias: str
    version: int
    state: TrajectoryState
    task: str | None
    root_node: str
    tools_hash: str
    key_id: str | None
    opened_at: float
    last_active_at: float
    purpose: str = "live"
    sealed_at: float | None = None
    sealed_by: str | None = None  # idle, or finish (on request)
    group_id: str | None = None
    round_id: str | None = None
    drop_reason: str | None = None
    draw: VersionDraw | None = None  # of its version; None: nothing was drawn
    calls: int = 0

    @property
    def group_key(self) -> str:
        """Trajectories with equal keys are attempts at one task."""
        return cohort_of(self.task, self.root_node, self.tools_hash)

    @property
    def family(self) -> str:
        """The task family; scores of one family are comparable."""
        return family_of(self.task, self.tools_hash)


class WorkflowResult(Record, frozen=True):
    """The result of a rollout's workflow; all None while it runs."""

    response: str | None = None  # JSON text
    reward: float | None = None  # the workflow's own
    failure: str | None = None  # the exception of a failed workflow
    tuning_id: str | None = None  # the run of the tuner that it belongs to


class Transcript(Record, frozen=True):
    """A trajectory with its content: calls in order, and messages up to its last answer (content/last_answer.py)."""

    trajectory: Trajectory
    calls: tuple[Call, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    feedback: tuple[Feedback, ...] = ()  # oldest first
    row: Mapping[str, Any] | None = None  # the task's row, if its task set is known
    returned: WorkflowResult | None = None  # None: not a rollout of the tuner
    tool_calls: tuple[ToolCall, ...] = ()  # with their outcomes, in order; see docs/tools.md


class Policy(Record, frozen=True):
    """One version of an alias: an adapter, a prompt, or both; version 0 has neither. A prompt shares its adapter."""

    alias: str
    version: int
    state: PolicyState
    served_name: str  # model name in vLLM
    adapter: str | None  # its folder; None: the base model
    created_at: float
    round_id: str | None = None
    evidence: Mapping[str, Any] = {}
    share: float | None = None  # of new trajectories, in a ramp or held back; the live version has the rest
    pruned_at: float | None = None  # when its folder was deleted; it cannot serve again
    recalled_at: float | None = None  # when its open trajectories had to go on with the live version, if rejected
    pinned_at: float | None = None  # when a person pinned it: it stays live, and nothing is released
    prompt_id: str | None = None  # of the system prompt that it is served with
    replicas: Sequence[str] = ()  # URLs of the replicas that are proven to serve it; empty: not recorded


class Key(Record, frozen=True):
    """An API key, by the SHA-256 hex of the key. None: no limit of its own.

    `agents`, and `models` of `model_list`: those that it may call; None: all.
    """

    id: str
    name: str
    hash: str
    scope: KeyScope
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None  # to the minute
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    agents: tuple[str, ...] | None = None
    max_parallel_requests: int | None = None
    expires_at: float | None = None
    models: tuple[str, ...] | None = None
    max_tokens: int | None = None  # of each answer
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


class KeyTokens(Record, frozen=True):
    """The prompt and completion tokens of a key on a UTC day (`2026-11-23`), and in its month up to then."""

    day: str
    today: int = 0
    this_month: int = 0


class Usage(Record, frozen=True):
    """Calls and tokens of a UTC day, a key, an agent or model, and a purpose; None: of all.

    A key id of "" stands for all calls without a checked key. `key_name` is None for keys of the environment.
    """

    day: str | None
    key_id: str | None
    key_name: str | None
    alias: str | None
    purpose: str | None
    calls: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


class Alarm(Record, frozen=True):
    """A condition that needs a person, with the reason in one sentence."""

    name: str
    reason: str
    raised_at: float
    last_raised_at: float
    count: int
    cleared_at: float | None = None
    sent_at: float | None = None  # when the webhook last took it, raised or cleared
