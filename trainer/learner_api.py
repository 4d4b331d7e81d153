"""What a learner does, as a protocol, and the messages by which a trainer asks for it over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

# The interface between controller and learner, what a base model can be trained on, and the report of a round.


class LogprobScorer(Protocol):
    """Computes logprobs as the trainer does."""

    def score(self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True) -> list[tuple[float, ...]]:
        """Return the logprobs of each row under the newest version (True), the base model (False) or the version of a
        reference.
        """
        ...


class LearnerProtocol(LogprobScorer, Protocol):
    """The learner of a round. References name versions in the adapter store (`adapters/adapter_store.py`).

    `save` publishes a version whole or not at all. `ratchet.trainer.learner_client.AgentLearner` implements it
    by the learner service, and in process for `ratchet.trainer.local_learner.Learner`.
    """

    @property
    def step(self) -> int: ...

    def unfit(self, row: TokenRow) -> str | None: ...

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport: ...

    def save(self, reference: str, /) -> None: ...

    def load(self, reference: str | None, settings: LearnerSettings, /) -> None: ...

    def report_progress_to(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class AgentHost(Protocol):
    """A base model with the states of any number of agents, as the learner service uses it. Not thread-safe.

    `ratchet.trainer.learner.host.LearnerHost` implements it, and says what each method promises and raises.
    """

    limits: ModelLimits
    on_rows: Callable[[int], None]  # gets the number of rows of each trained micro-batch

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int: ...

    def train_round(self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport: ...

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]: ...

    def save(self, agent: str, folder: Path) -> None: ...

    def close(self, agent: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the rows of a base model may be.

    vocabulary     number of token ids
    max_positions  maximum tokens of a row; None: no limit
    caps_logits    the model caps its logits, so that a temperature cannot be applied to them
    """

    vocabulary: int
    max_positions: int | None
    caps_logits: bool


def unfit(limits: ModelLimits, row: TokenRow) -> str | None:
    """Return why a base model cannot be trained on a row; None if it can."""
    return unfit_ids(limits, row.ids, f"row of trajectory {row.trajectory_id}", row.temperature)


def unfit_ids(limits: ModelLimits, ids: Sequence[int], what: str, temperature: float = 1.0) -> str | None:
    """Return why a base model cannot compute the logprobs of token ids; None if it can. `what` names them."""
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocabulary:
        return f"{what}: a token id is outside the base model's {limits.vocabulary} ids"
    if limits.max_positions is not None and len(ids) > limits.max_positions:
        return f"{what}: {len(ids)} tokens exceed the base model's {limits.max_positions} positions"
    if temperature != 1.0 and limits.caps_logits:
        return (
            f"{what}: temperature {temperature} cannot be applied to a base model that caps its logits; sample at "
            "temperature 1"
        )
    return None


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The figures of one round.

    loss, grad_norm             means over the round's optimizer steps; the norm is before clipping
    entropy                     of the policy at the trained tokens, mean in nats
    clip_ratio                  share of the trained tokens that the ratio's clip masked
    tokens_trained, rows, optimizer_steps  counts
    step                        optimizer steps since the first round
    logprob_abs_diff_mean/max   |trainer - vLLM| over the compared tokens, before the first step, nats
    tokens_compared             trained tokens of rows with `importance`; if 0, the two above are 0 and meaningless
    fresh_logprob_abs_diff_mean, fresh_tokens_compared  the same, only of rows of `age` 0
    importance_clipped_ratio    share of the compared tokens whose importance weight reached its cap
    seconds                     wall time of the round
    weight_change               L2 norm of the change of the LoRA parameters
    kl                          to the base model at the trained tokens, mean in nats; 0 if `beta` is 0
    rows_rejected               rows that vLLM sampled with another policy than the one that is trained
    tokens_forwarded            tokens of the training pass, with padding, shared prefixes counted once
    learning_rate               of the steps
    approx_kl                   how far the steps moved the policy: mean k3 at trained tokens, nats per token
    approx_kl_target            target of `approx_kl`, also reported with a fixed learning rate
    approx_kl_tokens            trained tokens that `approx_kl` was measured on
    approx_kl_floor             what `approx_kl` reads by rounding alone, measured in the round, nats per token
    logprob_change_share        of the change of log p by the steps, the share that the number format shows; 1 in fp32
    logprob_change_abs_mean     |log p after - log p before the steps|, mean over the same tokens
    logprob_change_positive_mean  the same with its sign, mean over those with a positive advantage
    dtype                       number format of the model's computation: bf16 or fp32
    mismatch                    trainer - vLLM logprob of each row's trained tokens, little-endian float16, in the order
                                of the rows; empty for rows that are not compared, None for rejected ones
    """

    loss: float
    grad_norm: float
    entropy: float
    clip_ratio: float
    tokens_trained: int
    rows: int
    optimizer_steps: int
    step: int
    logprob_abs_diff_mean: float
    logprob_abs_diff_max: float
    tokens_compared: int
    importance_clipped_ratio: float
    seconds: float
    weight_change: float
    kl: float = 0.0
    rows_rejected: int = 0
    tokens_forwarded: int = 0
    learning_rate: float = 0.0
    approx_kl: float = 0.0
    approx_kl_target: float = 0.0
    approx_kl_tokens: int = 0
    approx_kl_floor: float = 0.0
    logprob_change_share: float = 1.0
    logprob_change_abs_mean: float = 0.0
    logprob_change_positive_mean: float = 0.0
    dtype: str = "fp32"
    fresh_logprob_abs_diff_mean: float = 0.0
    fresh_tokens_compared: int = 0
    mismatch: tuple[bytes | None, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Return the figures by name, without those of single rows."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "mismatch"}


# What controller and learner service say to each other over HTTP. Imports no torch.
#
#     GET  /health                200 once the base model is loaded, 503 before
#     GET  /metrics               Prometheus
#     GET  /v1/status             JSON: LearnerStatus
#     POST /v1/operations/ID      OperationRequest, under an id that the client chose; a second one does nothing
#     GET  /v1/operations/ID      InProgress while it waits and runs, then its Answer
#
# Bodies are msgpack. A refused request has a status of 400 or more and a JSON body `Refusal`. An operation whose client
# asks no more before its turn does not run.
#
# State ids: open and train give an agent's state another id, whatever becomes of them, and train, score and save name
# the id that the client knows. A client that lost the answer of a round therefore cannot save or score what it does not
# know, nor can one whose learner was restarted or whose agent another client has opened: it opens the newest commit.

Verb = Literal["open", "train", "score", "save", "close"]
TOKEN_VARIABLE = "RATCHET_LEARNER_TOKEN"
MAX_AGENT_CHARS = 100


class OpenRequest(msgspec.Struct, frozen=True):
    """Open an agent, or replace its state. `source` is a checkpoint's reference, None for a new adapter.

    `version` is the controller's version of Ratchet, and `base_model` the digests of its base model's files by part,
    empty if it does not have them.
    """

    settings: LearnerSettings
    source: str | None
    version: str
    base_model: dict[str, str]


class TrainRequest(msgspec.Struct, frozen=True):
    """Train a round."""

    rows: tuple[TokenRow, ...]
    rate_scale: float


class ScoreRequest(msgspec.Struct, frozen=True):
    """Score token sequences: with the agent's adapter (True), the base model (False), or a checkpoint's adapter.

    `masks` has a byte for each token of a row, 1 if it is scored; an empty mask: all but the first.
    """

    rows: tuple[tuple[int, ...], ...]
    adapter: bool | str
    masks: tuple[bytes, ...] = ()


class SaveRequest(msgspec.Struct, frozen=True):
    """Write a checkpoint to a new reference."""

    target: str


class OperationRequest(msgspec.Struct, frozen=True):
    """An operation of an agent. `share` is its share of the compute time; `arguments` the request of its verb."""

    agent: str
    verb: Verb
    arguments: msgspec.Raw
    state: str = ""  # that the client knows
    share: float = 1.0


class InProgress(msgspec.Struct, frozen=True, tag=True):
    """An operation waits behind `ahead` others, or it runs (0); a round has trained so many rows."""

    ahead: int
    rows: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The end of an operation: the agent's state afterwards, and its result or the name and message of its error."""

    state: str
    step: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nil
    error: str | None = None
    message: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was refused: the name of a TrainerError and its message."""

    error: str
    message: str


class AgentStatus(msgspec.Struct, frozen=True):
    """An open agent. `seconds` is its compute time since the learner's start."""

    agent: str
    step: int
    share: float
    waiting: int
    seconds: float


class LearnerStatus(msgspec.Struct, frozen=True):
    """A learner. `instance` is another one after each start; `base_model_digests` are by part, empty if unknown."""

    instance: str
    version: str
    base_model: str
    base_model_digests: dict[str, str]
    sharding: str
    processes: int
    machines: int
    ready: bool = False
    limits: ModelLimits | None = None
    running: str | None = None  # "AGENT VERB"
    agents: tuple[AgentStatus, ...] = ()


encode = msgspec.msgpack.Encoder().encode
