"""A learner's operations: the verbs on the states of agents, and references to checkpoints. Imports no torch."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ratchet import __version__
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable, TrainerError
from ratchet.trainer.learner_api import (
    MAX_AGENT_CHARS,
    AgentHost,
    Answer,
    LearnerStatus,
    OpenRequest,
    OperationRequest,
    SaveRequest,
    ScoreRequest,
    TrainRequest,
    encode,
)
from ratchet.trainer.rows.token_row import scored_row

Arguments = TypeVar("Arguments")


class CheckpointReferences:
    """The local folders of references: a learner's host reads and writes folders only.

    A reference is what the store records of a version's checkpoint: a path, or a URL below `url`, the object storage
    in the learner's own settings, which `adapters` reaches. Checkpoints are only written under `roots`; without any,
    everywhere. Checksums are verified when a folder is read for the first time, unless this process wrote it.
    """

    def __init__(self, *roots: Path, adapters: AdapterStore | None = None, url: str | None = None) -> None:
        self._roots = tuple(root.absolute() for root in roots)
        self._adapters = adapters
        self._url = url
        self._verified: set[str] = set()

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the local folder of a complete checkpoint; without `state`, of its adapter.

        Raises CheckpointDamaged if a checksum is wrong, CheckpointError, LearnerServiceError.
        """
        if is_remote(reference):
            return self._storage_of(reference).fetch(reference, state=state)
        folder = Path(reference)
        if reference not in self._verified and (folder / checkpoint.MANIFEST).is_file():
            checkpoint.verify(folder)
            self._verified.add(reference)
        return folder

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Publish under a new reference the checkpoint that `save` writes into a new local folder.

        Raises CheckpointError, and LearnerServiceError for a place where this learner may not write.
        """
        if is_remote(reference):
            self._storage_of(reference).write(reference, save)
            return
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

    def _storage_of(self, reference: str) -> AdapterStore:
        if self._url is None or not reference.startswith(f"{self._url}/") or ".." in reference.split("/"):
            raise LearnerServiceError(
                f"version {reference} is outside of this learner's object storage, {self._url or 'none'}: start it "
                "with the controller's adapters.store"
            )
        assert self._adapters is not None
        return self._adapters


@dataclass(slots=True)
class OpenAgent:
    """An agent that is open. `state` is its state's id, empty if the state is unknown; `seconds` its compute time."""

    agent: str
    share: float
    state: str = ""
    step: int = 0
    seconds: float = 0.0


class AgentOperations:
    """Runs operations on a host, in the thread that owns it. `agents` are those that are open."""

    def __init__(
        self, host: AgentHost, agents: dict[str, OpenAgent], references: CheckpointReferences, status: LearnerStatus
    ) -> None:
        self._host = host
        self._agents = agents
        self._references = references
        self._status = status

    def run(self, request: OperationRequest, on_rows: Callable[[int], None] = lambda rows: None) -> Answer:
        """Run an operation to its end. Raises TrainerError."""
        if request.verb == "open":
            return self._open(request)
        agent = self._agents.get(request.agent)
        reads_state = request.verb != "score"
        result: Any = None
        if request.verb == "score":
            score = _decode(request, ScoreRequest)
            reads_state = score.adapter is True
        if agent is None or (reads_state and agent.state != request.state):
            raise LearnerUnreachable(
                f"the learner does not have the state of {request.agent} that this controller knows: it was restarted, "
                "another controller has opened the agent, or the answer of an operation was lost; its newest commit "
                "must be loaded"
            )
        if request.verb == "score":
            result = self._score(request.agent, score)
        elif request.verb == "train":
            train = _decode(request, TrainRequest)
            agent.state = secrets.token_hex(16)
            self._host.on_rows = on_rows
            result = self._host.train_round(request.agent, train.rows, train.rate_scale)
            agent.step = result.step
        elif request.verb == "save":
            target = _decode(request, SaveRequest).target
            self._references.write(target, lambda folder: self._host.save(request.agent, folder))
        else:
            del self._agents[request.agent]
            self._host.close(request.agent)
        return Answer(agent.state, agent.step, msgspec.Raw(encode(result)))

    def failure(self, name: str, error: TrainerError) -> Answer:
        agent = self._agents.get(name) or OpenAgent(name, 1.0)
        return Answer(agent.state, agent.step, error=type(error).__name__, message=str(error))

    def _open(self, request: OperationRequest) -> Answer:
        wanted = _decode(request, OpenRequest)
        self._check(request, wanted)
        agent = self._agents.setdefault(request.agent, OpenAgent(request.agent, request.share))
        agent.share, agent.state = request.share, ""  # if opening fails, nobody knows its state
        settings, folder = wanted.settings, None
        if wanted.source is not None:
            folder = self._references.fetch(wanted.source)
        elif settings.init_adapter is not None:
            adapter = self._references.fetch(settings.init_adapter, state=False)
            settings = replace(settings, init_adapter=str(adapter))
        agent.step = self._host.open(request.agent, settings, folder)
        agent.state = secrets.token_hex(16)
        return Answer(agent.state, agent.step)

    def _check(self, request: OperationRequest, wanted: OpenRequest) -> None:
        """Raise LearnerServiceError if this learner cannot train for the controller."""
        if wanted.version != __version__:
            raise LearnerServiceError(
                f"the learner runs Ratchet {__version__}, the controller {wanted.version}: install the same version"
            )
        known = self._status.base_model_digests
        parts = sorted(
            part for part in known.keys() & wanted.base_model.keys() if known[part] != wanted.base_model[part]
        )
        if parts:
            raise LearnerServiceError(
                f"the learner trains another base model ({self._status.base_model}): {', '.join(parts)} differ; start "
                "it with the controller's base_model"
            )
        if not request.agent or len(request.agent) > MAX_AGENT_CHARS:
            raise LearnerServiceError(f"agent {request.agent!r} cannot be opened: its name is empty or too long")

    def _score(self, agent: str, request: ScoreRequest) -> list[tuple[float, ...]]:
        named = request.adapter
        adapter = self._references.fetch(named, state=False) if isinstance(named, str) else named
        masks = request.masks or (b"",) * len(request.rows)
        rows = [scored_row(ids, tuple(mask)) if mask else ids for ids, mask in zip(request.rows, masks, strict=True)]
        return self._host.score(agent, rows, adapter=adapter)


def _decode(request: OperationRequest, kind: type[Arguments]) -> Arguments:
    """Return the arguments of a request. Raises LearnerServiceError, or RowError for a row that is inconsistent."""
    try:
        return msgspec.msgpack.decode(request.arguments, type=kind)
    except msgspec.MsgspecError as error:
        raise LearnerServiceError(f"the learner does not understand the request: {error}") from error
