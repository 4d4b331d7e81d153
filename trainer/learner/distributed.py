"""Several processes that train as one, as `accelerate launch` starts them: the first one leads, the others follow.

The leader is the trainer daemon; whatever its learner does that takes all of them (being made, a round, a checkpoint
written or loaded) it tells the followers first, who then do the same with the same rows. Promises: followers look at
nothing but what they are told, so that one daemon alone meets store, judge and vLLM; an error that all of them meet is
the leader's to handle; one that only some meet, or the end of one, ends all of them within seconds, before anything is
committed, and each says which process met what: the next start goes on from the last commit. Torch is imported when the
first learner is made or followed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ratchet.trainer.errors import TrainerError, WorkerProcessLost
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner_protocol import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=30)  # between two rounds there may be hours without traffic
_COMPANY = timedelta(seconds=10)  # that a process with an error waits for the others to meet it as well
_NOTES_WITHIN = timedelta(seconds=10)
_STOP = "stop"
_AGAIN = "What was not committed is trained by the next start"
_BROKEN = ("gloo", "NCCL")  # what torch's messages of a broken connection name; gloo's have no class of their own


def processes() -> int:
    """Return how many processes this one is of, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_leader() -> bool:
    """Return whether this process is the first of them."""
    return _rank() == 0


class FollowerChannel:
    """How the leader speaks to the followers: in a group of its own, on the CPU, whatever they train on.

    `company` is how long a process that met an error waits for the others to meet one too.
    """

    def __init__(self, company: timedelta = _COMPANY) -> None:
        import torch.distributed
        from accelerate import PartialState

        PartialState(timeout=_PATIENCE)
        self._distributed = torch.distributed
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._company = company
        self._turn = 0  # what all of them have done so far
        self._apart = False  # what one of them waits for in a group, another does not come to
        server, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Beside the groups, for what must be told while another process waits in one of them.
        notes = torch.distributed.TCPStore(server, port, is_master=False, timeout=_NOTES_WITHIN)
        self._notes = torch.distributed.PrefixStore("ratchet", notes)

    def tell(self, what: str, *values: Any) -> None:
        """Say something to every follower. Raises WorkerProcessLost."""
        with self._kept():
            self._distributed.broadcast_object_list([what, values], src=0, group=self._group)

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for what the leader says next. Raises WorkerProcessLost."""
        said: list[Any] = [None, None]
        with self._kept():
            self._distributed.broadcast_object_list(said, src=0, group=self._group)
        return said[0], said[1]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Do what the leader said, as every process does, and hear how it went for the others.

        Raises the TrainerError that all of them met, else WorkerProcessLost with what the others say.
        """
        own: TrainerError | None = None
        try:
            with self._kept():
                yield
        except WorkerProcessLost:
            raise
        except TrainerError as error:
            own = error
        except Exception as error:  # nothing that the others could meet as well: they must not wait
            self._apart = True
            self._note(error)
            raise
        self._note(own)
        self._meet(own)
        met = list(self._noted().values())
        if any(met) and not all(met):
            self._apart = True
            raise WorkerProcessLost(self._why()) from own
        self._turn += 1
        if own is not None:
            raise own

    def close(self) -> None:
        """Let the followers go, and leave the group, unless a process is waited for in vain: that would hang here."""
        if self._apart:
            return
        try:
            if is_leader():
                self.tell(_STOP)
        except WorkerProcessLost:
            log.info("event=follower_gone")
        else:
            self._distributed.destroy_process_group()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Tell the end of another process, which its collectives meet as a broken connection. Raises
        WorkerProcessLost.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, self._distributed.DistError) and not any(w in str(error) for w in _BROKEN):
                raise
            self._apart = True
            raise WorkerProcessLost(self._why()) from error

    def _meet(self, own: TrainerError | None) -> None:
        """Wait until every process has done what the leader said; with an error only for a while."""
        try:
            met = self._distributed.barrier(group=self._group, async_op=True)
            met.wait(_PATIENCE if own is None else self._company)
        except RuntimeError as gone:
            self._apart = True
            raise WorkerProcessLost(self._why()) from (own or gone)

    def _note(self, error: Exception | None) -> None:
        """Write down, where all can read it, how it went here."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            self._notes.set(f"{self._turn}/{_rank()}", text)
            self._notes.delete_key(f"{self._turn - 2}/{_rank()}")  # the one before may still be read
        except RuntimeError as gone:
            log.warning("event=note_lost reason=%r", str(gone))

    def _noted(self) -> dict[int, str]:
        """Return how it went for each process that has said so."""
        try:
            keys = {rank: f"{self._turn}/{rank}" for rank in range(processes())}
            return {rank: self._notes.get(key).decode() for rank, key in keys.items() if self._notes.check([key])}
        except RuntimeError as gone:
            log.warning("event=notes_unread reason=%r", str(gone))
            return {}

    def _why(self) -> str:
        met = [f"process {rank} met {text}" for rank, text in self._noted().items() if text]
        if not met:
            return f"a process that trains along has ended: its own last lines say why. {_AGAIN}"
        return f"not all processes went on: {'; '.join(met)}. {_AGAIN}"


class RankZeroLearner(Learner):
    """The leader's learner: what it does, the followers do."""

    def __init__(
        self,
        line: FollowerChannel,
        base_model: str,
        settings: LearnerSettings,
        *,
        workdir: Path,
        resume_from: Path | None = None,
    ) -> None:
        self._line = line
        line.tell("made", base_model, settings, workdir, resume_from)
        with line.in_step():
            super().__init__(base_model, settings, workdir=workdir, resume_from=resume_from)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Learn from the rows once, all together. Raises as `Learner.train_round` does, and WorkerProcessLost."""
        self._line.tell("train_round", list(rows), rate_scale)
        with self._line.in_step():
            return super().train_round(rows, rate_scale)

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Raises as `Learner.save` does, and WorkerProcessLost."""
        self._line.tell("save", folder)
        with self._line.in_step():
            super().save(folder)

    def load(self, folder: Path | None, settings: LearnerSettings) -> None:
        """Go on from a checkpoint, all together. Raises as `Learner.load` does, and WorkerProcessLost."""
        self._line.tell("load", folder, settings)
        with self._line.in_step():
            super().load(folder, settings)


def follow(line: FollowerChannel, make: Callable[..., Learner] = Learner) -> int:
    """Do what the leader says until it says stop; return the exit code. A signal does not end this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        _do_as_told(line, make)
    except WorkerProcessLost as lost:
        log.error("event=follower_stopped error=WorkerProcessLost reason=%r", str(lost))
        return 1
    line.close()
    return 0


def _do_as_told(line: FollowerChannel, make: Callable[..., Learner]) -> None:
    learner: Learner | None = None
    while True:
        what, values = line.hear()
        if what == _STOP:
            return
        try:
            with line.in_step():
                if what == "made":
                    base_model, settings, workdir, resume_from = values
                    learner = make(base_model, settings, workdir=workdir / _own(), resume_from=resume_from)
                elif learner is not None:
                    getattr(learner, what)(*values)
        except WorkerProcessLost:
            raise
        except TrainerError as error:  # the leader met it as well
            log.info("event=follower_error error=%s reason=%r", type(error).__name__, str(error))


def _own() -> str:
    return f"process{_rank()}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
