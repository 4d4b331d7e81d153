"""The messages between workers and the coordinator: MessagePack in the bodies of HTTP POST requests.

A worker has a session, which begins with `Hello` and is valid for one start of the coordinator (`boot`). Both may run
on different machines: `text_hash` shows that they hash texts alike. Then each POST carries the messages of one turn of
the worker's event loop, and its response an answer to each. After a failure the worker sends `Hello` again, with a
higher `epoch`: messages of earlier ones, which may arrive late, are not read. `seen` is the latest `at` that the worker
has received, in seconds of the coordinator's clock: it shows how old a message is that the network has delayed.
"""

from __future__ import annotations

import msgspec

from ratchet.proxy.errors import BadRequest, NotFound, NotReady, ProxyError
from ratchet.proxy.messages.admission_records import AdmissionRequest, EndedCall
from ratchet.proxy.messages.limit_records import Amount
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, Placement

PATH = "/coordinator"
TOKEN_HEADER = "x-ratchet-worker"  # of an operator's request that a worker forwards


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The beginning of a session: the worker's open calls, and those ended calls that the store may not have yet.

    `is_behind`: nor does it have all of the worker's earlier processes. `seen` is of the coordinator's start `boot`.
    """

    worker: str
    session: str
    epoch: int
    text_hash: int
    open: tuple[Placement, ...] = ()
    ended: tuple[EndedCall, ...] = ()  # oldest first
    is_behind: bool = False
    boot: str = ""
    seen: float = 0.0


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The end of a session: the worker has stopped. Answered by `Stranger`."""

    worker: str
    session: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Hello`, sent when the coordinator can decide."""

    boot: str
    at: float


class Find(msgspec.Struct, frozen=True, tag="find"):
    """A call begins: find its place. `number` names it in the worker's session."""

    number: int
    request: AdmissionRequest


class End(msgspec.Struct, frozen=True, tag="end"):
    """A call has ended."""

    number: int
    leaves: tuple[Leaf, ...]
    ended_at: float
    retryable: bool


class MarkUnanswered(msgspec.Struct, frozen=True, tag="unanswered"):
    """The answer of an ended call did not reach its client."""

    link: Link
    attempt: AttemptKey
    at: float


class Amounts(msgspec.Struct, frozen=True, tag="amounts"):
    """What the worker has taken of limits that the workers share."""

    amounts: tuple[Amount, ...]


class CaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """The store has all of the worker's earlier processes, which it did not have at the session's beginning."""


Message = Find | End | MarkUnanswered | Amounts | CaughtUp


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """The messages of one turn."""

    worker: str
    session: str
    boot: str
    epoch: int
    seen: float
    messages: tuple[Message, ...]


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """The answer to `Find`."""

    placement: Placement


class MessagesWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """The answer to a partial `Find`: send it again with all messages."""


class PlacementRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to a call that cannot be placed, as the client gets it."""

    name: str  # the error's class
    message: str
    status: int
    param: str | None = None
    code: str | None = None


class Levels(msgspec.Struct, frozen=True, tag="levels"):
    """The answer to `Amounts`: the level of all workers for each amount, or what the others have running."""

    levels: tuple[float, ...]
    workers: int


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """The answer to all other messages."""


Answer = Placed | MessagesWanted | PlacementRefused | Levels | Noted


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """The answers to a batch, in its order."""

    answers: tuple[Answer, ...]
    at: float


class Stranger(msgspec.Struct, frozen=True, tag="stranger"):
    """The coordinator does not know the session: nothing of the batch was read. Begin another one."""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Hello | Batch | Goodbye).decode
decode_response = msgspec.msgpack.Decoder(Welcome | Answers | Stranger).decode


_ERRORS: dict[str, type[ProxyError]] = {one.__name__: one for one in (BadRequest, NotFound, NotReady)}


def refused(error: ProxyError) -> PlacementRefused:
    """Return an error as an answer."""
    return PlacementRefused(type(error).__name__, str(error), error.status, error.param, error.code)


def to_error(answer: PlacementRefused) -> ProxyError:
    """Return a refusal as the error that the client gets."""
    kind = _ERRORS.get(answer.name, ProxyError)
    return kind(answer.message, param=answer.param, code=answer.code, status=answer.status)
