"""A learner's operations: sessions of agents, references to checkpoints, and the verbs on them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable, TrainerError
from ratchet.trainer.learner_api import (
    AgentHost,
    Answer,
    LoadRequest,
    OpenRequest,
    SaveRequest,
    ScoreRequest,
    TrainRequest,
    Verb,
    encode,
)
from ratchet.trainer.rows.token_row import scored_row
from ratchet.trainer.settings.learner_settings import LearnerSettings

# The open agents of a learner: session id, revision and step of each. docs in trainer/learner_api.py.
#
# Read by the HTTP server's thread and changed by the compute thread only.


@dataclass(slots=True)
class AgentSession:
    """One open agent. `seconds` is its compute time."""

    agent: str
    share: float
    revision: int = 0
    step: int = 0
    seconds: float = 0.0
    id: str = field(default_factory=lambda: secrets.token_hex(16))


class AgentSessions:
    """The open agents by session id; an agent has one session."""

    def __init__(self) -> None:
        self._by_id: dict[str, AgentSession] = {}

    def all(self) -> tuple[AgentSession, ...]:
        return tuple(sorted(self._by_id.values(), key=lambda one: one.agent))

    def of_agent(self, agent: str) -> AgentSession | None:
        """Return an agent's session; None if it is not open."""
        return next((one for one in tuple(self._by_id.values()) if one.agent == agent), None)

    def add(self, session: AgentSession) -> None:
        self._by_id[session.id] = session

    def remove(self, session: AgentSession) -> None:
        """Remove a session; its id is unknown from now on."""
        self._by_id.pop(session.id, None)

    def get(self, session_id: str) -> AgentSession:
        """Return a session. Raises LearnerUnreachable if the learner does not know it."""
        session = self._by_id.get(session_id)
        if session is None:
            raise LearnerUnreachable(
                "the learner does not know this session: it was restarted, or another controller has opened the agent; "
                "its newest commit must be loaded"
            )
        return session


def check_revision(session: AgentSession, revision: int) -> None:
    """Raise LearnerUnreachable if the client does not know the newest state of its agent."""
    if session.revision != revision:
        raise LearnerUnreachable(
            f"the answer of an earlier operation of {session.agent} was lost (revision {revision}, the learner has "
            f"{session.revision}); its newest commit must be loaded"
        )


# References of checkpoints as local folders: a learner's host reads and writes folders only.
#
# A reference is what the store records of a version's checkpoint: a path, which is used as it is, or a URL.


class CheckpointReferences(Protocol):
    """Resolves references."""

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the local folder of a complete checkpoint; without `state`, of its adapter."""
        ...

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Publish under a new reference the checkpoint that `save` writes into a new local folder."""
        ...


class LocalReferences:
    """References that are paths. Checkpoints are only written under `roots`; without any, everywhere.

    Checksums are verified when a checkpoint is read for the first time, unless this process wrote it.
    """

    def __init__(self, *roots: Path) -> None:
        self._roots = tuple(root.absolute() for root in roots)
        self._verified: set[str] = set()

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the folder. Raises CheckpointDamaged if a checksum is wrong."""
        folder = Path(reference)
        if reference not in self._verified and (folder / checkpoint.MANIFEST).is_file():
            checkpoint.verify(folder)
            self._verified.add(reference)
        return folder

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Let `save` write the folder. Raises LearnerServiceError for a folder outside of the roots."""
        folder = Path(reference)
        if not folder.is_absolute() or ".." in folder.parts:
            raise LearnerServiceError(f"checkpoint {reference} is not an absolute path without `..`")
        if self._roots and not any(folder.is_relative_to(root) for root in self._roots):
            allowed = ", ".join(map(str, self._roots))
            raise LearnerServiceError(
                f"checkpoint {reference} is outside of {allowed}, where this learner writes: start it with the "
                "controller's state_dir and adapters.store"
            )
        save(folder)
        self._verified.add(reference)


class StoredReferences:
    """References that are paths, or URLs below `url`, the object storage in the learner's own settings."""

    def __init__(self, local: LocalReferences, adapters: AdapterStore, url: str | None) -> None:
        self._local = local
        self._adapters = adapters
        self._url = url

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the folder, or a verified local copy. Raises CheckpointError, LearnerServiceError."""
        if not is_remote(reference):
            return self._local.fetch(reference, state=state)
        return self._adapters.fetch(self._allowed(reference), state=state)

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Let `save` write the folder, or publish what it writes. Raises CheckpointError, LearnerServiceError."""
        if is_remote(reference):
            self._adapters.write(self._allowed(reference), save)
        else:
            self._local.write(reference, save)

    def _allowed(self, reference: str) -> str:
        if self._url is None or not reference.startswith(f"{self._url}/") or ".." in reference.split("/"):
            raise LearnerServiceError(
                f"version {reference} is outside of this learner's object storage, {self._url or 'none'}: start it "
                "with the controller's adapters.store"
            )
        return reference


# The verbs of the service as operations of the learner's host. Runs in the compute thread; imports no torch.
#
# The state of an agent is that of its session's revision. A verb that changes the state raises the revision before it
# begins: whatever becomes of it, a client that does not know the outcome cannot go on with another state by mistake.

OnRows = Callable[[int], None]
Request = TypeVar("Request")


def decode_request(body: bytes, kind: type[Request]) -> Request:
    """Return the request of a body. Raises LearnerServiceError, or RowError for a row that is inconsistent."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LearnerServiceError(f"the learner does not understand the request: {error}") from error


class AgentOperations:
    """Runs the verbs on a host. Raises TrainerError."""

    def __init__(self, host: AgentHost, sessions: AgentSessions, references: CheckpointReferences) -> None:
        self._host = host
        self._sessions = sessions
        self._references = references

    def open(self, request: OpenRequest) -> Answer:
        """Open an agent; an older session of it ends."""
        earlier = self._sessions.of_agent(request.agent)
        if earlier is not None:
            self._sessions.remove(earlier)  # first: if opening fails, its state is unknown
        session = AgentSession(request.agent, request.share, seconds=earlier.seconds if earlier else 0.0)
        session.step = self._opened(request.agent, request.settings, request.source)
        self._sessions.add(session)
        return answer(session)

    def run(self, verb: Verb, session_id: str, body: bytes, on_rows: OnRows) -> Answer:
        """Run another verb than open."""
        session = self._sessions.get(session_id)
        if verb == "train":
            return self._train(session, decode_request(body, TrainRequest), on_rows)
        if verb == "score":
            return self._score(session, decode_request(body, ScoreRequest))
        if verb == "save":
            return self._save(session, decode_request(body, SaveRequest))
        if verb == "load":
            return self._load(session, decode_request(body, LoadRequest))
        self._sessions.remove(session)
        self._host.close(session.agent)
        return answer(session)

    def failure(self, agent: str, error: TrainerError) -> Answer:
        session = self._sessions.of_agent(agent) or AgentSession(agent, 1.0, id="")
        return Answer(session.id, session.revision, session.step, error=type(error).__name__, message=str(error))

    def _train(self, session: AgentSession, request: TrainRequest, on_rows: OnRows) -> Answer:
        check_revision(session, request.revision)
        session.revision += 1
        report = self._host.train_round(session.agent, request.rows, request.rate_scale, on_rows)
        session.step = report.step
        return answer(session, report)

    def _score(self, session: AgentSession, request: ScoreRequest) -> Answer:
        if request.adapter is True:
            check_revision(session, request.revision)
        named = request.adapter
        adapter = self._references.fetch(named, state=False) if isinstance(named, str) else named
        masks = request.masks or (b"",) * len(request.rows)
        rows = [scored_row(ids, tuple(mask)) if mask else ids for ids, mask in zip(request.rows, masks, strict=True)]
        return answer(session, self._host.score(session.agent, rows, adapter=adapter))

    def _save(self, session: AgentSession, request: SaveRequest) -> Answer:
        check_revision(session, request.revision)
        self._references.write(request.target, lambda folder: self._host.save(session.agent, folder))
        return answer(session)

    def _load(self, session: AgentSession, request: LoadRequest) -> Answer:
        session.revision += 1
        session.step = self._opened(session.agent, request.settings, request.source)
        return answer(session)

    def _opened(self, agent: str, settings: LearnerSettings, source: str | None) -> int:
        """Open the agent with local folders in place of references; return its optimizer steps."""
        if source is not None:
            return self._host.open(agent, settings, self._references.fetch(source))
        if settings.init_adapter is not None:
            folder = self._references.fetch(settings.init_adapter, state=False)
            settings = replace(settings, init_adapter=str(folder))
        return self._host.open(agent, settings, None)


def answer(session: AgentSession, result: Any = None) -> Answer:
    return Answer(session.id, session.revision, session.step, msgspec.Raw(encode(result)))
