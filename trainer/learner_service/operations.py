"""The verbs of the service as operations of the learner's host. Runs in the compute thread; imports no torch.

The state of an agent is that of its session's revision. A verb that changes the state raises the revision before it
begins: whatever becomes of it, a client that does not know the outcome cannot go on with another state by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from ratchet.trainer.errors import LearnerRefused, TrainerError
from ratchet.trainer.learner_api.messages import (
    Answer,
    LoadRequest,
    OpenRequest,
    SaveRequest,
    ScoreRequest,
    TrainRequest,
    Verb,
    encode,
)
from ratchet.trainer.learner_api.protocol import AgentHost
from ratchet.trainer.learner_service.checkpoint_references import CheckpointReferences
from ratchet.trainer.learner_service.sessions import AgentSession, AgentSessions, check_revision
from ratchet.trainer.rows.token_row import scored_row
from ratchet.trainer.settings.learner_settings import LearnerSettings

OnRows = Callable[[int], None]
Request = TypeVar("Request")


def decode_request(body: bytes, kind: type[Request]) -> Request:
    """Return the request of a body. Raises LearnerRefused, or RowError for a row that is inconsistent."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LearnerRefused(f"the learner does not understand the request: {error}") from error


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
        """Return the answer of an operation that failed."""
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
    """Return the answer of an operation that succeeded."""
    return Answer(session.id, session.revision, session.step, msgspec.Raw(encode(result)))
