"""Training in several processes, started by torchrun or `accelerate launch`: rank zero leads, the others follow.

Rank zero has the clients of the learner. It broadcasts every operation of its host to the followers, which run the same
operation with the same rows. Only rank zero uses files, store, judge and vLLM. It handles errors that all processes
have. If only some have an error, or one exits,
all stop within seconds, before the commit, and each logs which process had which error; the next start continues from
the last commit. Torch is imported with the first host.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ratchet.trainer.errors import TrainerError, WorkerProcessLost
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner.launch import IDLE_TIMEOUT, processes, rank
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings

log = logging.getLogger(__name__)

_ERROR_TIMEOUT = timedelta(seconds=10)  # wait of a process with an error for the errors of the others
_STATUS_TIMEOUT = timedelta(seconds=10)
_STOP_SECONDS = 7.0  # from a signal to the end of a follower that rank zero does not stop
_CREATE, _STOP = "create", "stop"
_REMEDY = "The next start trains the groups that were not committed"
_CONNECTION_ERRORS = ("gloo", "NCCL")  # named by torch's messages about a broken connection; gloo has no own exception


def is_leader() -> bool:
    return rank() == 0


class FollowerChannel:
    """Broadcasts operations to the followers in a CPU process group of its own.

    A process with an error waits `error_timeout` for the errors of the others.
    """

    def __init__(self, error_timeout: timedelta = _ERROR_TIMEOUT) -> None:
        import torch.distributed

        from ratchet.trainer.learner import process_group

        process_group.join()
        self._distributed = torch.distributed
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._error_timeout = error_timeout
        self._operations = 0  # completed by all processes
        self._own_error = ""  # of the operation that runs
        self._out_of_sync = False  # a process may wait forever in a collective
        server, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Works while other processes wait in a collective.
        statuses = torch.distributed.TCPStore(server, port, is_master=False, timeout=_STATUS_TIMEOUT)
        self._statuses = torch.distributed.PrefixStore("ratchet", statuses)

    def send(self, operation: str, *arguments: Any, **named: Any) -> None:
        """Broadcast an operation to all followers. Raises WorkerProcessLost."""
        with self._translated_errors():
            self._distributed.broadcast_object_list([operation, arguments, named], src=0, group=self._group)

    def receive(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Wait for the next operation. Raises WorkerProcessLost."""
        message: list[Any] = [None, None, None]
        with self._translated_errors():
            self._distributed.broadcast_object_list(message, src=0, group=self._group)
        return message[0], message[1], message[2]

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
        errors = self._read_statuses()  # all have published theirs; fewer if rank zero has gone meanwhile
        if len(errors) < processes() or (any(errors.values()) and not all(errors.values())):
            self._out_of_sync = True
            raise WorkerProcessLost(self._describe_errors()) from own
        self._operations += 1
        self._own_error = ""
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
            barrier.wait(IDLE_TIMEOUT if own is None else self._error_timeout)
        except RuntimeError as lost:
            self._out_of_sync = True
            raise WorkerProcessLost(self._describe_errors()) from (own or lost)

    def _publish_status(self, error: Exception | None) -> None:
        self._own_error = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            self._statuses.set(f"{self._operations}/{rank()}", self._own_error)
            self._statuses.delete_key(f"{self._operations - 2}/{rank()}")  # the previous one may still be read
        except RuntimeError as lost:
            log.warning("event=status_not_published reason=%r", str(lost))

    def _read_statuses(self) -> dict[int, str]:
        try:
            keys = {rank: f"{self._operations}/{rank}" for rank in range(processes())}
            return {rank: self._statuses.get(key).decode() for rank, key in keys.items() if self._statuses.check([key])}
        except RuntimeError as lost:
            log.warning("event=statuses_unreadable reason=%r", str(lost))
            return {}

    def _describe_errors(self) -> str:
        statuses = {rank(): self._own_error} | self._read_statuses()
        errors = [f"process {number} met {text}" for number, text in sorted(statuses.items()) if text]
        if not errors:
            return f"a training process has exited: its last log lines say why. {_REMEDY}"
        return f"not all processes completed the operation: {'; '.join(errors)}. {_REMEDY}"


def _on_all(operation: str) -> Any:
    """Return the method of a host that all processes run."""

    def run(host: LeadingHost, *arguments: Any, **named: Any) -> Any:
        with host._on_all_processes(operation, *arguments, **named):
            return getattr(super(LeadingHost, host), operation)(*arguments, **named)

    return run


class LeadingHost(LearnerHost):
    """The host of rank zero, which tells every operation to the followers. Raises WorkerProcessLost as well."""

    def __init__(self, channel: FollowerChannel, base_model: str, process: LearnerProcessSettings, **more: Any) -> None:
        self._channel = channel
        with self._on_all_processes(_CREATE, base_model, process):
            super().__init__(base_model, process, **more)

    open = _on_all("open")  # only rank zero reads the checkpoint
    train_round = _on_all("train_round")
    score = _on_all("score")
    save = _on_all("save")  # the agent's state is gathered from all processes
    close = _on_all("close")

    def end(self) -> None:
        self._channel.close()

    @contextmanager
    def _on_all_processes(self, operation: str, *arguments: Any, **named: Any) -> Iterator[None]:
        self._channel.send(operation, *arguments, **named)
        with self._channel.collective():
            yield


def follow(channel: FollowerChannel, make: Callable[..., LearnerHost] = LearnerHost) -> int:
    """Run the operations of rank zero until it sends stop; return the exit code.

    A signal to stop reaches rank zero too, which sends stop. If that does not come, the process ends by itself.
    """
    _end_some_time_after_a_signal()
    try:
        _run_operations(channel, make)
    except WorkerProcessLost as lost:
        log.error("event=follower_stopped error=WorkerProcessLost reason=%r", str(lost))
        return 1
    channel.close()
    return 0


def _run_operations(channel: FollowerChannel, make: Callable[..., LearnerHost]) -> None:
    host: LearnerHost | None = None
    while True:
        operation, arguments, named = channel.receive()
        if operation == _STOP:
            return
        try:
            with channel.collective():
                if operation == _CREATE:
                    host = make(*arguments)
                elif host is not None:
                    getattr(host, operation)(*arguments, **named)
        except WorkerProcessLost:
            raise
        except TrainerError as error:  # rank zero has it as well
            log.info("event=follower_error error=%s reason=%r", type(error).__name__, str(error))


def _end_some_time_after_a_signal() -> None:
    """Exit `_STOP_SECONDS` after SIGTERM or SIGINT. A thread does: this one may wait for a process that is gone."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        time.sleep(_STOP_SECONDS)
        log.error("event=follower_stopped reason='rank zero did not stop it within %.0f s'", _STOP_SECONDS)
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=wait, name="stop-after-signal", daemon=True).start()
