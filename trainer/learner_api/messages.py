"""What controller and learner service say to each other over HTTP. Imports no torch.

    GET  /health                    200 once the base model is loaded, 503 before
    GET  /metrics                   Prometheus
    GET  /v1/status                 JSON: LearnerStatus
    POST /v1/open                   OpenRequest: an agent's state; the answer has its session id
    POST /v1/sessions/ID/train      TrainRequest; result RoundReport
    POST /v1/sessions/ID/score      ScoreRequest; result one tuple of logprobs per row
    POST /v1/sessions/ID/save       SaveRequest
    POST /v1/sessions/ID/load       LoadRequest: another checkpoint in place, as for a rollback
    POST /v1/sessions/ID/close

Bodies are msgpack. Answers of POST are streams of frames (four bytes of length, big endian, then msgpack):
`QueuePosition`, `RowsDone` and `Alive` while the operation waits and runs, then one `Answer`. So a long round needs no
job to ask for, and silence for longer than SILENCE_SECONDS means that the connection is lost. A request that is refused
before it waits has a status of 400 or more and a JSON body `Refusal`.

Revisions: every train, load and open of a session raises its revision, and train, score and save name the revision
that the client knows. A client that lost the answer of a round therefore cannot save or score what it does not know;
it loads the newest commit. A session that the learner does not know (it was restarted, or another client has opened
the agent) is status 409.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from ratchet.trainer.learner_api.protocol import ModelLimits, RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

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
    """Return a message as msgpack."""
    return _encoder.encode(message)


def encode_frame(frame: Frame) -> bytes:
    """Return a frame with its length."""
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
    """Return the result of a score."""
    return msgspec.msgpack.decode(result, type=list[tuple[float, ...]])


def decode_report(result: msgspec.Raw) -> RoundReport:
    """Return the result of a round."""
    return msgspec.msgpack.decode(result, type=RoundReport)
