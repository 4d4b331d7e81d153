"""LearnerAccess: the learner that a trainer process uses; found at `learner.url`, or started as a child process.

Promises: a child ends with the trainer, however that ends (its command runs under the process guard, which reads the
pipe that only the trainer holds), and is started again, later each time, if it exits; after `max_restarts` exits in ten
minutes the trainer stops with the reason. Several controllers may use one learner, but a base model has one learner:
the store has a lease of the learner's instance, which each of its controllers renews, and a controller of another
learner stops with the address of the first. Nothing here waits: until the learner is known, the operations of the
agents raise LearnerUnreachable. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import Store
from ratchet.trainer.adapters.base_model_files import DIGESTS, digests, model_folder
from ratchet.trainer.errors import LearnerServiceError, LearnerTaken, LearnerUnreachable
from ratchet.trainer.learner_api.messages import TOKEN_VARIABLE, LearnerStatus
from ratchet.trainer.learner_client.connection import LearnerConnection
from ratchet.trainer.learner_client.remote_learner import LearnerAgent, RemoteLearner
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

UNREACHABLE = "learner_unreachable"  # alarm

_POLL_SECONDS = 0.2
_MAX_DELAY = 30.0  # seconds before a restart
_RESTART_WINDOW = 600.0  # seconds
_STOP_SECONDS = 20.0  # for the guard and the learner to end
_REPORT_SECONDS = 60.0  # of silence until it is reported, and between two reports
_FAST_LOOKS = 50  # polls at the full rate until the learner is found


@dataclass(frozen=True, slots=True)
class LearnerCommand:
    """How a learner is started: a process guard with the learner's command, which listens on `url`.

    The learner gets the token by variable. Its log is appended to `log`.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    url: str
    log: Path
    max_restarts: int = 5


class LearnerChild:
    """A learner as a child process that is started again if it exits. Not thread-safe."""

    def __init__(self, command: LearnerCommand) -> None:
        self._command = command
        self._token = secrets.token_urlsafe(32)
        self._exits: deque[float] = deque()
        self._restart_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
        """The bearer token of the child."""
        return self._token

    @property
    def pid(self) -> int | None:
        """The pid of the process guard; None if nothing runs."""
        return self._process.pid if self._process is not None else None

    def keep_running(self, now: float) -> None:
        """Start the child if it is due. Raises LearnerServiceError if it exits too often."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            _close_pipe(self._process)
            self._process = None
            self._restart_at = now + self._delay_after_exit(code, now)
        if now >= self._restart_at:
            self._start()

    def stop(self) -> None:
        """Stop the child: its guard sees that the pipe is closed."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipe(process)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # the guard's learner gets SIGTERM from the kernel
            process.wait()

    def _start(self) -> None:
        self._command.log.parent.mkdir(parents=True, exist_ok=True)
        with self._command.log.open("ab") as output:
            self._process = subprocess.Popen(
                list(self._command.arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**self._command.environment, TOKEN_VARIABLE: self._token},
                start_new_session=True,
            )
        log.info("event=learner_starting pid=%d url=%s log=%s", self._process.pid, self._command.url, self._command.log)

    def _delay_after_exit(self, code: int, now: float) -> float:
        self._exits.append(now)
        while now - self._exits[0] > _RESTART_WINDOW:
            self._exits.popleft()
        if len(self._exits) > self._command.max_restarts:
            raise LearnerServiceError(
                f"the learner exited {len(self._exits)} times within {_RESTART_WINDOW / 60:.0f} minutes, the last time "
                f"with code {code}: its log {self._command.log} says why"
            )
        delay = min(_MAX_DELAY, 2.0 ** (len(self._exits) - 1))
        log.warning("event=learner_exited code=%d restart_in=%.0f log=%s", code, delay, self._command.log)
        return delay


class LearnerAccess:
    """The learner of the agents of one trainer process. A thread starts, finds and watches it until `close`."""

    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        command: LearnerCommand | None = None,
        environ: Mapping[str, str] = os.environ,
        report_seconds: float = _REPORT_SECONDS,
    ) -> None:
        self._store = store
        self._report_seconds = report_seconds
        self._on_failure: Callable[[], None] = lambda: None
        self._lease_seconds = settings.lease_seconds
        url = settings.learner_process.url
        if url is None and command is None:
            raise LearnerUnreachable("no learner is set: set learner.url to the address of a running `ratchet learner`")
        self._child = LearnerChild(command) if url is None and command is not None else None
        token = self._child.token if self._child else environ.get(TOKEN_VARIABLE) or None
        self._connection = LearnerConnection(url or (command.url if command else ""), token, self.check)
        self._probe = LearnerConnection(self._connection.url, token)
        self._digests = _digests(settings)
        self._failure: LearnerServiceError | None = None
        self._pending = "the learner has not answered yet"
        self._granted = ""  # instance
        self._other: tuple[str, float] | None = None  # the holder of the lease when it was first seen, and its expiry
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="learner-access", daemon=True)
        self._thread.start()

    @property
    def guard_pid(self) -> int | None:
        """The pid of the child's process guard; None if the learner runs elsewhere."""
        return self._child.pid if self._child else None

    def learner_of(self, settings: TrainerSettings, source: Path | str | None) -> RemoteLearner:
        """Return the learner of one agent, resumed from a checkpoint; a LearnerFactory."""
        agent = LearnerAgent(settings.model, settings.share, self._digests)
        return RemoteLearner(self._connection, agent, settings.learner, source)

    @property
    def failure(self) -> LearnerServiceError | None:
        """The error that makes waiting for the learner useless; None so far."""
        return self._failure

    def call_on_failure(self, stop: Callable[[], None]) -> None:
        """Call `stop`, in any thread, once waiting for the learner is useless."""
        self._on_failure = stop
        if self._failure is not None:
            stop()

    def check(self) -> None:
        """Raise LearnerUnreachable until the learner may be used, or the error that makes waiting useless."""
        if self._failure is not None:
            raise self._failure
        if not self._granted:
            raise LearnerUnreachable(self._pending)

    def close(self) -> None:
        """Stop the child, if there is one, and close the connections."""
        self._stop.set()
        self._thread.join()
        if self._child is not None:
            self._child.stop()
            if self._granted:
                with suppress(StoreUnavailable):
                    self._store.leases.release(self._lease_name, self._granted)
        self._connection.close()
        self._probe.close()

    def __enter__(self) -> LearnerAccess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _lease_name(self) -> str:
        identity = json.dumps(self._digests, sort_keys=True)
        return f"learner:{hashlib.sha256(identity.encode()).hexdigest()[:32]}"

    def _watch(self) -> None:
        looks, due, quiet_since = 0, 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            try:
                if self._child is not None:
                    self._child.keep_running(now)
                if now >= due:
                    looks = 0 if self._granted else looks + 1
                    self._look()
                    due = now + (self._lease_seconds / 4 if self._granted or looks > _FAST_LOOKS else 0.0)
            except LearnerUnreachable as outage:
                self._granted, self._pending = "", str(outage)
                quiet_since = self._report(outage, quiet_since, now)
            except LearnerServiceError as failure:
                self._failure = failure
                self._on_failure()
                log.error("event=learner_unusable error=%s reason=%r", type(failure).__name__, str(failure))
                return
            if self._stop.wait(_POLL_SECONDS):
                return

    def _report(self, outage: LearnerUnreachable, quiet_since: float, now: float) -> float:
        """Log an outage that lasts, and raise its alarm; return the time of the last line."""
        if now - quiet_since < self._report_seconds:
            return quiet_since
        log.warning("event=learner_unreachable url=%s reason=%r", self._connection.url, str(outage))
        with suppress(StoreUnavailable):
            self._store.alarms.raise_(UNREACHABLE, f"nothing is trained until the learner answers: {outage}")
        return now

    def _look(self) -> None:
        """Take or renew the lease for the learner that answers. Raises LearnerServiceError."""
        status = self._probe.status()
        try:
            if not self._take(status):
                return
        except StoreUnavailable as outage:
            log.warning("event=learner_lease_not_renewed reason=%r", str(outage))
            return  # a learner that was granted stays so: the store decides about commits in any case
        if self._granted != status.instance:
            with suppress(StoreUnavailable):
                self._store.alarms.clear(UNREACHABLE)
            log.info("event=learner_found instance=%s ready=%s", status.instance, status.ready)
        self._granted, self._other = status.instance, None

    def _take(self, status: LearnerStatus) -> bool:
        """Return whether this learner has the base model's lease. Raises LearnerTaken."""
        leases, name = self._store.leases, self._lease_name
        if leases.acquire(name, status.instance, self._lease_seconds):
            return True
        holder = next((one for one in leases.holders(name) if one.name == name), None)
        if holder is None:  # it has expired meanwhile
            return False
        if _address(holder.owner) == _address(status.instance):  # the same learner before its restart
            leases.release(name, holder.owner)
            return False
        first = self._other or (holder.owner, holder.expires_at)
        self._other = first
        self._pending = f"waiting to see whether the learner at {_address(holder.owner)} still trains this base model"
        if holder.owner == first[0] and holder.expires_at > first[1]:
            raise LearnerTaken(
                f"the base model is trained by the learner at {_address(holder.owner)}, and this is another one "
                f"({_address(status.instance)}): set learner.url to the first, or stop it"
            )
        return False


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _address(instance: str) -> str:
    return instance.rpartition(":")[0]


def _digests(settings: TrainerSettings) -> dict[str, str]:
    folder = model_folder(settings.base_model)
    if folder is None or not (folder / "config.json").is_file():
        return {"name": settings.base_model}
    return digests(folder, settings.checkpoints.parent / DIGESTS)
