"""What a learner does, as a protocol, and the messages by which a trainer asks for it over HTTP."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

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


class LearnerProtocol(Protocol):
    """The learner of a round. References name versions in the adapter store (`adapters/adapter_store.py`).

    `save` publishes a version whole or not at all. `RemoteLearner` implements it by the learner service, and
    `ratchet.trainer.learner.host.Learner` in process for local references.
    """

    @property
    def step(self) -> int: ...

    def unfit(self, row: TokenRow) -> str | None: ...

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport: ...

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True
    ) -> list[tuple[float, ...]]: ...

    def save(self, reference: str, /) -> None: ...

    def load(self, reference: str | None, settings: LearnerSettings, /) -> None: ...


class AgentHost(Protocol):
    """A base model with the states of any number of agents, as the learner service uses it. Not thread-safe.

    `ratchet.trainer.learner.host.LearnerHost` implements it, and says what each method promises and raises.
    """

    limits: ModelLimits

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int: ...

    def train_round(
        self,
        agent: str,
        rows: Sequence[TokenRow],
        rate_scale: float = 1.0,
        on_rows: Callable[[int], None] | None = None,
    ) -> RoundReport: ...

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]: ...

    def save(self, agent: str, folder: Path) -> None: ...

    def close(self, agent: str) -> None: ...


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
#     GET  /health                    200 once the base model is loaded, 503 before
#     GET  /metrics                   Prometheus
#     GET  /v1/status                 JSON: LearnerStatus
#     POST /v1/open                   OpenRequest: an agent's state; the answer has its session id
#     POST /v1/sessions/ID/train      TrainRequest; result RoundReport
#     POST /v1/sessions/ID/score      ScoreRequest; result one tuple of logprobs per row
#     POST /v1/sessions/ID/save       SaveRequest
#     POST /v1/sessions/ID/load       LoadRequest: another checkpoint in place, as for a rollback
#     POST /v1/sessions/ID/close
#
# Bodies are msgpack. Answers of POST are streams of frames (four bytes of length, big endian, then msgpack):
# `QueuePosition`, `RowsDone` and `Alive` while the operation waits and runs, then one `Answer`. So a long round needs
# no job to ask for, and silence for longer than SILENCE_SECONDS means that the connection is lost. A request that is
# refused before it waits has a status of 400 or more and a JSON body `Refusal`.
#
# Revisions: every train, load and open of a session raises its revision, and train, score and save name the revision
# that the client knows. A client that lost the answer of a round therefore cannot save or score what it does not know;
# it loads the newest commit. A session that the learner does not know (it was restarted, or another client has opened
# the agent) is status 409.

Verb = Literal["open", "load", "train", "score", "save", "close"]
TOKEN_VARIABLE = "RATCHET_LEARNER_TOKEN"
MSGPACK = "application/msgpack"
ALIVE_SECONDS = 5.0  # between two frames of an answer, at most
SILENCE_SECONDS = 120.0  # then the connection counts as lost
MAX_AGENT_CHARS = 100

_LENGTH = struct.Struct(">I")
_MAX_FRAME = 2**31


class OpenRequest(msgspec.Struct, frozen=True):
    """Open an agent. `source` is a checkpoint's reference, None for a new adapter.

    `share` is the agent's share of the compute time. `version` is the controller's version of Ratchet, and
    `base_model` the digests of its base model's files by part, empty if it does not have them.
    """

    agent: str
    settings: LearnerSettings
    source: str | None
    share: float
    version: str
    base_model: dict[str, str]


class LoadRequest(msgspec.Struct, frozen=True):
    """Replace the state of an open agent by that of a checkpoint; None: by a new adapter."""

    settings: LearnerSettings
    source: str | None


class TrainRequest(msgspec.Struct, frozen=True):
    """Train a round."""

    revision: int
    rows: tuple[TokenRow, ...]
    rate_scale: float


class ScoreRequest(msgspec.Struct, frozen=True):
    """Score token sequences: with the agent's adapter (True), the base model (False), or a checkpoint's adapter.

    `masks` has a byte for each token of a row, 1 if it is scored; an empty mask: all but the first.
    """

    revision: int
    rows: tuple[tuple[int, ...], ...]
    adapter: bool | str
    masks: tuple[bytes, ...] = ()


class SaveRequest(msgspec.Struct, frozen=True):
    """Write a checkpoint to a new reference."""

    revision: int
    target: str


class QueuePosition(msgspec.Struct, frozen=True, tag=True):
    """The operation waits behind `ahead` others; 0: it runs."""

    ahead: int


class RowsDone(msgspec.Struct, frozen=True, tag=True):
    """The running round has trained this many rows."""

    rows: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Nothing has changed; the connection lives."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The end of an operation: the session afterwards, and its result or the name and message of its error."""

    session: str
    revision: int
    step: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nil
    error: str | None = None
    message: str = ""


Frame = QueuePosition | RowsDone | Alive | Answer


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
    ready: bool
    sharding: str
    processes: int
    machines: int
    limits: ModelLimits | None
    running: str | None  # "AGENT VERB"
    agents: tuple[AgentStatus, ...]


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def encode_frame(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def read_frames(chunks: Iterable[bytes]) -> Iterator[Frame]:
    """Yield the frames of a streamed answer. Raises ValueError if it is not one; an incomplete frame is dropped."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > _MAX_FRAME:
                raise ValueError("not an answer of the learner service")
            end = _LENGTH.size + length
            if len(buffer) < end:
                break
            yield _frames.decode(bytes(buffer[_LENGTH.size : end]))
            del buffer[:end]


def decode_scores(result: msgspec.Raw) -> list[tuple[float, ...]]:
    return msgspec.msgpack.decode(result, type=list[tuple[float, ...]])


def decode_report(result: msgspec.Raw) -> RoundReport:
    return msgspec.msgpack.decode(result, type=RoundReport)
