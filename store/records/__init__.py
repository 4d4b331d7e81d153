"""The frozen records that components exchange: what the proxy ships, and what the trainer and the API read.

Token ids are packed int32, logprobs packed float32, both little-endian. Times are Unix seconds (float, UTC).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratchet.store.records.base import Record
from ratchet.store.records.encoding import pack_ids as pack_ids
from ratchet.store.records.encoding import pack_logprobs as pack_logprobs
from ratchet.store.records.encoding import unpack_ids as unpack_ids
from ratchet.store.records.encoding import unpack_logprobs as unpack_logprobs
from ratchet.store.records.training import Group as Group
from ratchet.store.records.training import JudgeRequest as JudgeRequest
from ratchet.store.records.training import PastScore as PastScore
from ratchet.store.records.training import Round as Round
from ratchet.store.records.training import Tally as Tally
from ratchet.store.records.training import Verdict as Verdict
from ratchet.store.states import CallState, KeyScope, PolicyState, TrajectoryState

if TYPE_CHECKING:
    from ratchet.store.records.tool_calls import ToolCall

BASE_VERSION = 0  # version 0 of every alias is the base model without an adapter
REDACTED = "redacted"  # why a call is untrainable of which something was not written down
OTHER = "other_model"  # the purpose of calls to a model that is not trained here
TOOL_GRAMMAR = "tool_grammar"  # among a call's sampling parameters: vLLM held its tool calls to a grammar
RESAMPLE = "resample"  # the purpose of a further answer to a recorded prompt: trained with it, never counted as traffic


class MessageNode(Record, frozen=True):
    """One message in its place: `hash` names it and everything before it; `body` is its canonical JSON."""

    hash: str
    parent: str
    role: str
    body: bytes


class CallStarted(Record, frozen=True, tag="started"):
    """A call as it was when it arrived: identity, policy and sampling are fixed here and never later."""

    call_id: str
    trajectory_id: str
    started_at: float
    alias: str
    version: int
    dialect: str  # chat, completions, responses, messages
    streamed: bool
    linked_by: str  # how the trajectory was found; docs/linking.md lists the ways
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
    purpose: str = "live"  # live, shadow: may be trained; eval (a version by name), other (another model): never
    sampling: Mapping[str, Any] = {}  # the sampling parameters that were sent, e.g. temperature, top_p, seed
    nodes: tuple[MessageNode, ...] = ()  # the messages of the prompt that this proxy has not shipped before
    tools: bytes = b""  # canonical JSON of the tool list, where not shipped before

    @property
    def policy(self) -> str:
        """What answered: `alias@version`; of a model that is not trained here its name."""
        return self.alias if self.purpose == OTHER else f"{self.alias}@{self.version}"


class Choice(Record, frozen=True):
    """One sampled answer: `token_ids` (n int32) and `logprobs` (n float32) are the engine's own, in order."""

    index: int
    finish_reason: str | None
    token_ids: bytes
    logprobs: bytes
    reply_node: str = ""
    link_key: str = ""
    tool_call_ids: tuple[str, ...] = ()


class CallEnded(Record, frozen=True, tag="ended"):
    """A call's end. `start` repeats its beginning, so that either record alone makes the row.

    `context` says what `prompt_ids` holds: `root` and `fork` hold the whole prompt, `exact` only what came after
    the parent's prompt and completion, which this prompt begins with, id for id.
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
    untrainable: str | None = None  # why no token of this call may carry loss, e.g. "no_token_ids", "image", "echo"
    error: str | None = None
    upstream: str | None = None
    nodes: tuple[MessageNode, ...] = ()  # the answers
    response_id: str | None = None  # what the client knows the answer by, where that does not follow from the call's id


class Feedback(Record, frozen=True, tag="feedback"):
    """What somebody said of one answer or of a whole trajectory. What was said never changes.

    `trajectory_id` and `call_id` are where it belongs; a `target` that is not stored yet is waited for.
    """

    id: str
    kind: str  # what `target` names: trajectory, call, response
    target: str
    source: str  # who says it: an end user, else the key; the same source said again is a revision
    given_at: float
    key_id: str | None = None  # whose trajectories it may speak of
    trusted: bool = False  # an operator's: of anyone's
    value: float | None = None  # the more, the better; None if only words were given
    comment: str = ""
    demonstration: str | None = None  # the answer that would have been right
    trajectory_id: str | None = None
    call_id: str | None = None  # None if it is said of the whole trajectory
    applied_at: float | None = None  # when a verdict first took it into account


CallRecord = CallStarted | CallEnded
Shipment = CallStarted | CallEnded | Feedback


class OpenLeaf(Record, frozen=True):
    """An answer that a coming request may continue, as the proxy needs it after a restart."""

    trajectory_id: str
    call_id: str
    choice: int
    alias: str
    version: int
    link_key: str
    tool_call_ids: tuple[str, ...]
    key_id: str | None
    purpose: str
    sequence: bytes  # every id of the context up to and with the answer (int32)
    last_active_at: float
    family: str | None = None  # of the trajectory
    extended: bool = False  # a later call continues it
    reply: bytes = b""  # the answer as canonical JSON
    asked: tuple[bytes, ...] = ()  # the trajectory's first prompt message and the one that was answered, likewise


class UnansweredCall(Record, frozen=True):
    """A call of an open trajectory that nobody got an answer to, as the proxy needs it after a restart."""

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
    """What one proxy knows and holds: the versions it serves and the trajectories pinned to each."""

    id: str
    url: str
    live_versions: Mapping[str, int]  # alias -> version that new trajectories begin on
    pinned_trajectories: Mapping[str, int]  # "alias@version" -> open trajectories pinned to it
    shipped_until: float  # everything that it recorded before this moment is in the store
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
    """Return what attempts at the same thing have in common: the task, else the root prompt and tools."""
    return f"task:{task}" if task else f"root:{root_node}:{tools_hash}"


def family_of(task: str | None, tools_hash: str) -> str:
    """Return what tasks of a kind have in common: `math` of the task `math/17`; without a task, the tools."""
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
    sealed_by: str | None = None  # idle, or finish: somebody said that it is complete
    group_id: str | None = None
    round_id: str | None = None
    drop_reason: str | None = None
    calls: int = 0

    @property
    def group_key(self) -> str:
        """Trajectories with equal keys are attempts at the same thing."""
        return cohort_of(self.task, self.root_node, self.tools_hash)

    @property
    def family(self) -> str:
        """Trajectories of a family are scored on one scale."""
        return family_of(self.task, self.tools_hash)


class WorkflowResult(Record, frozen=True):
    """What the workflow of a rollout came to; all None while it works."""

    response: str | None = None  # JSON text
    reward: float | None = None  # the workflow's own
    failure: str | None = None  # the exception of one that failed


class Transcript(Record, frozen=True):
    """A trajectory with its content: calls in order, and the messages up to its last word (see endings.py)."""

    trajectory: Trajectory
    calls: tuple[Call, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    feedback: tuple[Feedback, ...] = ()  # oldest first
    row: Mapping[str, Any] | None = None  # the task's row, where its task set is known
    returned: WorkflowResult | None = None  # None: no rollout of the tuner
    tool_calls: tuple[ToolCall, ...] = ()  # what became of each, in order; see docs/tools.md


class Policy(Record, frozen=True):
    """One version of an alias: an adapter, a prompt, or both; version 0 has neither. A prompt shares its adapter."""

    alias: str
    version: int
    state: PolicyState
    served_name: str  # the model name that vLLM knows it by
    adapter: str | None  # its folder; None: the base model
    created_at: float
    round_id: str | None = None
    evidence: Mapping[str, Any] = {}
    canary_share: float | None = None  # of new trajectories, where it is a canary
    pruned_at: float | None = None  # when its folder was deleted; it can serve no more
    prompt_id: str | None = None  # of the prompt that is swapped in


class Key(Record, frozen=True):
    """An API key without the key: `hash` is the SHA-256 hex of it. Limits are per minute; None is none."""

    id: str
    name: str
    hash: str
    scope: KeyScope
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None  # to the minute
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Alarm(Record, frozen=True):
    """Something that a person should know, with the reason in one sentence."""

    name: str
    reason: str
    raised_at: float
    last_raised_at: float
    count: int
    cleared_at: float | None = None
