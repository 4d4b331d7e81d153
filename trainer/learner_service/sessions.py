"""The open agents of a learner: session id, revision and step of each. docs in trainer/learner_api/messages.py.

Read by the HTTP server's thread and changed by the compute thread only.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from ratchet.trainer.errors import LearnerUnreachable


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
        """Return the sessions by agent."""
        return tuple(sorted(self._by_id.values(), key=lambda one: one.agent))

    def of_agent(self, agent: str) -> AgentSession | None:
        """Return an agent's session; None if it is not open."""
        return next((one for one in tuple(self._by_id.values()) if one.agent == agent), None)

    def add(self, session: AgentSession) -> None:
        """Add the session of an agent that has none."""
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
