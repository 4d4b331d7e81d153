"""Distributed training with `accelerate launch`: rank zero leads, the other processes follow.

Rank zero is the trainer's controller. It broadcasts every collective operation of its learner (creation, round,
checkpoint written or loaded) to the followers, which run the same operation with the same rows. Only rank zero uses
store, judge and vLLM. The controller handles errors that all processes have. If only some have an error, or one exits,
all stop within seconds, before the commit, and each logs which process had which error; the next start continues from
the last commit. Torch is imported with the first learner.
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

_IDLE_TIMEOUT = timedelta(days=30)  # there may be hours without traffic between two rounds
_ERROR_TIMEOUT = timedelta(seconds=10)  # wait of a process with an error for the errors of the others
_STATUS_TIMEOUT = timedelta(seconds=10)
_STOP = "stop"
_REMEDY = "The next start trains the groups that were not committed"
_CONNECTION_ERRORS = ("gloo", "NCCL")  # named by torch's messages about a broken connection; gloo has no own exception


def processes() -> int:
    """Return the number of processes of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_leader() -> bool:
    """Return whether this process has rank zero."""
    return _rank() == 0


class FollowerChannel:
    """Broadcasts operations to the followers in a CPU process group of its own.

    A process with an error waits `error_timeout` for the errors of the others.
    """

    def __init__(self, error_timeout: timedelta = _ERROR_TIMEOUT) -> None:
        import torch.distributed
        from accelerate import PartialState

        PartialState(timeout=_IDLE_TIMEOUT)
        self._distributed = torch.distributed
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        self._error_timeout = error_timeout
        self._operations = 0  # completed by all processes
        self._out_of_sync = False  # a process may wait forever in a collective
        server, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Works while other processes wait in a collective.
        statuses = torch.distributed.TCPStore(server, port, is_master=False, timeout=_STATUS_TIMEOUT)
        self._statuses = torch.distributed.PrefixStore("ratchet", statuses)

    def send(self, operation: str, *arguments: Any) -> None:
        """Broadcast an operation to all followers. Raises WorkerProcessLost."""
        with self._translated_errors():
            self._distributed.broadcast_object_list([operation, arguments], src=0, group=self._group)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next operation. Raises WorkerProcessLost."""
        message: list[Any] = [None, None]
        with self._translated_errors():
            self._distributed.broadcast_object_list(message, src=0, group=self._group)
        return message[0], message[1]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run an operation that all processes run, and compare the results.

        Raises the TrainerError if all processes have one, WorkerProcessLost if only some have.
        """
        own: TrainerError | None = None
        try:
            with self._translated_errors():
                yield
        except WorkerProcessLost:
            raise
        except TrainerError as error:
            own = error
        except Exception as error:  # the others do not have it, and must not wait for this process
            self._out_of_sync = True
            self._publish_status(error)
            raise
        self._publish_status(own)
        self._wait_for_all(own)
        errors = list(self._read_statuses().values())
        if any(errors) and not all(errors):
            self._out_of_sync = True
            raise WorkerProcessLost(self._describe_errors()) from own
        self._operations += 1
        if own is not None:
            raise own

    def close(self) -> None:
        """Stop the followers and leave the group; skipped if the processes are out of sync, because it would hang."""
        if self._out_of_sync:
            return
        try:
            if is_leader():
                self.send(_STOP)
        except WorkerProcessLost:
            log.info("event=follower_gone")
        else:
            self._distributed.destroy_process_group()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise WorkerProcessLost for the broken connection of a process that has exited."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, self._distributed.DistError) and not any(
                name in str(error) for name in _CONNECTION_ERRORS
            ):
                raise
            self._out_of_sync = True
            raise WorkerProcessLost(self._describe_errors()) from error

    def _wait_for_all(self, own: TrainerError | None) -> None:
        """Wait until all processes have finished the operation; with an error only for `error_timeout`."""
        try:
            barrier = self._distributed.barrier(group=self._group, async_op=True)
            barrier.wait(_IDLE_TIMEOUT if own is None else self._error_timeout)
        except RuntimeError as lost:
            self._out_of_sync = True
            raise WorkerProcessLost(self._describe_errors()) from (own or lost)

    def _publish_status(self, error: Exception | None) -> None:
        """Publish the error of this process, "" for none."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            self._statuses.set(f"{self._operations}/{_rank()}", text)
            self._statuses.delete_key(f"{self._operations - 2}/{_rank()}")  # the previous one may still be read
        except RuntimeError as lost:
            log.warning("event=status_not_published reason=%r", str(lost))

    def _read_statuses(self) -> dict[int, str]:
        """Return the published errors by rank."""
        try:
            keys = {rank: f"{self._operations}/{rank}" for rank in range(processes())}
            return {rank: self._statuses.get(key).decode() for rank, key in keys.items() if self._statuses.check([key])}
        except RuntimeError as lost:
            log.warning("event=statuses_unreadable reason=%r", str(lost))
            return {}

    def _describe_errors(self) -> str:
        errors = [f"process {rank} met {text}" for rank, text in self._read_statuses().items() if text]
        if not errors:
            return f"a training process has exited: its last log lines say why. {_REMEDY}"
        return f"not all processes completed the operation: {'; '.join(errors)}. {_REMEDY}"


class RankZeroLearner(Learner):
    """The learner of rank zero; the followers run the same operations."""

    def __init__(
        self,
        channel: FollowerChannel,
        base_model: str,
        settings: LearnerSettings,
        *,
        workdir: Path,
        resume_from: Path | None = None,
    ) -> None:
        self._channel = channel
        channel.send("create", base_model, settings, workdir, resume_from)
        with channel.collective():
            super().__init__(base_model, settings, workdir=workdir, resume_from=resume_from)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train on the rows with all processes. Raises as `Learner.train_round` does, and WorkerProcessLost."""
        self._channel.send("train_round", list(rows), rate_scale)
        with self._channel.collective():
            return super().train_round(rows, rate_scale)

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Raises as `Learner.save` does, and WorkerProcessLost."""
        self._channel.send("save", folder)
        with self._channel.collective():
            super().save(folder)

    def load(self, folder: Path | None, settings: LearnerSettings) -> None:
        """Load a checkpoint in all processes. Raises as `Learner.load` does, and WorkerProcessLost."""
        self._channel.send("load", folder, settings)
        with self._channel.collective():
            super().load(folder, settings)


def follow(channel: FollowerChannel, make: Callable[..., Learner] = Learner) -> int:
    """Run the operations of rank zero until it sends stop; return the exit code. Signals are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        _run_operations(channel, make)
    except WorkerProcessLost as lost:
        log.error("event=follower_stopped error=WorkerProcessLost reason=%r", str(lost))
        return 1
    channel.close()
    return 0


def _run_operations(channel: FollowerChannel, make: Callable[..., Learner]) -> None:
    learner: Learner | None = None
    while True:
        operation, arguments = channel.receive()
        if operation == _STOP:
            return
        try:
            with channel.collective():
                if operation == "create":
                    base_model, settings, workdir, resume_from = arguments
                    learner = make(base_model, settings, workdir=workdir / _process_folder(), resume_from=resume_from)
                elif learner is not None:
                    getattr(learner, operation)(*arguments)
        except WorkerProcessLost:
            raise
        except TrainerError as error:  # rank zero has it as well
            log.info("event=follower_error error=%s reason=%r", type(error).__name__, str(error))


def _process_folder() -> str:
    return f"process{_rank()}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
