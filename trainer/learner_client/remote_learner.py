"""RemoteLearner: one agent's learner over the learner service; implements LearnerProtocol. Imports no torch.

It opens the agent with its first operation. If the connection or the learner's session is lost, the operation raises
LearnerUnreachable and nothing is sent again. The next operation opens the agent again by itself if its state is that of
a checkpoint: it was loaded or saved and not trained since. Otherwise it raises LearnerUnreachable until `load`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet import __version__
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable
from ratchet.trainer.learner_api.messages import (
    Answer,
    Frame,
    LoadRequest,
    OpenRequest,
    QueuePosition,
    RowsDone,
    SaveRequest,
    ScoreRequest,
    TrainRequest,
    Verb,
    decode_report,
    decode_scores,
)
from ratchet.trainer.learner_api.protocol import ModelLimits, RoundReport, unfit
from ratchet.trainer.learner_client.connection import LearnerConnection, made_error
from ratchet.trainer.observability.progress import TRAINING, Phase, Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearnerAgent:
    """Whose learner it is. `share` is its share of the compute time; `base_model` the digests of its files by part."""

    name: str
    share: float = 1.0
    base_model: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SavedState:
    """A checkpoint that equals the learner's state."""

    settings: LearnerSettings
    source: str | None


class RemoteLearner:
    """The learner of one agent. One thread at a time may train, save and load; others may score beside it."""

    def __init__(
        self,
        connection: LearnerConnection,
        agent: LearnerAgent,
        settings: LearnerSettings,
        source: str | Path | None = None,
    ) -> None:
        self._connection = connection
        self._agent = agent
        self._settings = settings
        self._saved: _SavedState | None = _SavedState(settings, _reference(source))
        self._lock = threading.Lock()
        self._session = ""  # empty: not open
        self._revision = 0
        self._step = 0
        self._limits: ModelLimits | None = None
        self._progress = Progress()

    @property
    def step(self) -> int:
        """Optimizer steps of the agent; 0 before its first operation."""
        return self._step

    def report_progress_to(self, progress: Progress) -> None:
        """Report the progress of rounds here from now on."""
        self._progress = progress

    def unfit(self, row: TokenRow) -> str | None:
        """Return why the base model cannot be trained on a row; None if it can. Raises LearnerUnreachable."""
        if self._limits is None:
            self._limits = self._connection.status().limits
        if self._limits is None:
            raise LearnerUnreachable("the learner is loading its base model")
        return unfit(self._limits, row)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train on the rows once. Raises as `Learner.train_round` does, and LearnerUnreachable; never tries again."""
        session = self._opened()
        self._saved = None
        phase = self._progress.begin(TRAINING, len(rows))
        try:
            request = TrainRequest(self._revision, tuple(rows), rate_scale)
            return decode_report(self._run("train", session, request, self._watcher(phase, len(rows))).result)
        finally:
            phase.end()

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path | str = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of each row, as `Learner.score` does; a text or path is a checkpoint's reference."""
        ids = tuple(tuple(row.ids if isinstance(row, TokenRow) else row) for row in rows)
        scored_with = adapter if isinstance(adapter, bool) else str(adapter)
        session = self._opened()
        masks = tuple(bytes(row.mask) if isinstance(row, TokenRow) else b"" for row in rows)
        request = ScoreRequest(self._revision, ids, scored_with, masks if any(masks) else ())
        return decode_scores(self._run("score", session, request).result)

    def save(self, target: str | Path) -> None:
        """Write a checkpoint to a new reference. Raises as `Learner.save` does, and LearnerUnreachable."""
        reference = _reference(target)
        self._run("save", self._opened(), SaveRequest(self._revision, str(reference)))
        self._saved = _SavedState(self._settings, reference)

    def load(self, source: str | Path | None, settings: LearnerSettings) -> None:
        """Take the state of a checkpoint; None: of a new adapter. Raises as `Learner.load` does."""
        self._settings = settings
        wanted = _SavedState(settings, _reference(source))
        self._saved = None
        if self._session:
            try:
                self._run("load", self._session, LoadRequest(wanted.settings, wanted.source))
            except LearnerUnreachable as lost:
                log.info("event=learner_session_lost agent=%s reason=%r", self._agent.name, str(lost))
        self._saved = wanted
        self._opened()

    def close(self) -> None:
        """Let the learner forget the agent; a learner that does not answer is left alone."""
        session, self._session = self._session, ""
        if session:
            try:
                self._connection.post(_path("close", session), None)
            except LearnerServiceError as error:
                log.info("event=learner_not_closed agent=%s reason=%r", self._agent.name, str(error))

    def _opened(self) -> str:
        """Return the session; open the agent if it has none. Raises LearnerUnreachable."""
        with self._lock:
            if self._session:
                return self._session
            if self._saved is None:
                raise LearnerUnreachable(
                    f"the learner lost the state of {self._agent.name}: its newest commit must be loaded"
                )
            request = OpenRequest(
                agent=self._agent.name,
                settings=self._saved.settings,
                source=self._saved.source,
                share=self._agent.share,
                version=__version__,
                base_model=dict(self._agent.base_model),
            )
            answer = self._connection.post("/v1/open", request)
            self._limits = None  # of the learner that runs now
            self._session, self._revision, self._step = answer.session, answer.revision, answer.step
            return self._session

    def _run(
        self, verb: Verb, session: str, request: Any, on_frame: Callable[[Frame], None] = lambda frame: None
    ) -> Answer:
        """Run a verb; an outage ends the session."""
        try:
            answer = self._connection.exchange(_path(verb, session), request, on_frame)
        except LearnerServiceError:
            self._drop(session)
            raise
        if verb in ("train", "load") and answer.session == self._session:
            self._revision, self._step = answer.revision, answer.step
        if answer.error is None:
            return answer
        error = made_error(answer.error, answer.message)
        if isinstance(error, LearnerServiceError):
            self._drop(session)
        raise error

    def _drop(self, session: str) -> None:
        with self._lock:
            if self._session == session:
                self._session = ""

    def _watcher(self, phase: Phase, total: int) -> Callable[[Frame], None]:
        def receive(frame: Frame) -> None:
            if isinstance(frame, RowsDone):
                phase.at(min(frame.rows, total), total)
            elif isinstance(frame, QueuePosition) and frame.ahead:
                log.info("event=learner_waiting agent=%s ahead=%d", self._agent.name, frame.ahead)

        return receive


def _path(verb: Verb, session: str) -> str:
    return f"/v1/sessions/{session}/{verb}"


def _reference(source: str | Path | None) -> str | None:
    """Return a reference as text; a path is made absolute, because the learner has another working folder."""
    return str(source.absolute()) if isinstance(source, Path) else source
