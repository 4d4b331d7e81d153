"""The trainer's side of a learner: the connection, the learner behind it, and its start as a child process."""

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
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import httpx
import msgspec

from ratchet import __version__
from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import Store
from ratchet.trainer import errors
from ratchet.trainer.adapters.base_model_files import DIGESTS, digests, model_folder
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable, TrainerError
from ratchet.trainer.learner_api import (
    TOKEN_VARIABLE,
    Answer,
    InProgress,
    LearnerStatus,
    ModelLimits,
    OpenRequest,
    OperationRequest,
    Refusal,
    RoundReport,
    SaveRequest,
    ScoreRequest,
    TrainRequest,
    Verb,
    encode,
    unfit,
)
from ratchet.trainer.observability.progress import TRAINING, Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings

# HTTP connections to one learner service. Errors of the network and of the service become TrainerError here.

_decoder = msgspec.msgpack.Decoder(InProgress | Answer)
_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 120.0  # then the connection counts as lost
_STATUS_SECONDS = 30.0


class LearnerConnection:
    """The service at a URL. Several threads may use it. `check` is called before each operation, and may refuse it.

    Its methods raise LearnerUnreachable and LearnerServiceError.
    """

    def __init__(self, url: str, token: str | None = None, check: Callable[[], None] = lambda: None) -> None:
        self.url = url.rstrip("/")
        self._check = check
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise LearnerServiceError(f"learner.url {url} is not a URL: {error}") from error

    def close(self) -> None:
        self._http.close()

    def status(self) -> LearnerStatus:
        try:
            return msgspec.json.decode(self._ask("GET", "/v1/status", timeout=_STATUS_SECONDS), type=LearnerStatus)
        except msgspec.MsgspecError as error:
            raise LearnerServiceError(
                f"learner.url {self.url} is not this version's learner service: {error}"
            ) from error

    def run(
        self, request: OperationRequest, on_progress: Callable[[InProgress], None] = lambda progress: None
    ) -> Answer:
        """Run an operation to its end, and return its answer, also if it failed. `on_progress` gets what changes.

        Never sends a request twice.
        """
        self._check()
        path, last = f"/v1/operations/{secrets.token_hex(16)}", InProgress(0, 0)
        self._ask("POST", path, content=encode(request))
        while True:
            try:
                found = _decoder.decode(self._ask("GET", path))
            except msgspec.MsgspecError as error:
                raise LearnerServiceError(f"learner.url {self.url} is not a learner service: {error}") from error
            if isinstance(found, Answer):
                return found
            if found != last:
                on_progress(found)
            last = found

    def _ask(self, method: str, path: str, **more: Any) -> bytes:
        try:
            response = self._http.request(method, path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LearnerUnreachable(
                f"learner.url {self.url} does not answer ({error or type(error).__name__}): start `ratchet learner` "
                "there, or set the address of a running one"
            ) from error
        if not response.is_error:
            return response.content
        try:
            refusal = msgspec.json.decode(response.content, type=Refusal)
        except msgspec.MsgspecError:
            raise LearnerServiceError(
                f"learner.url {self.url} is not a learner service: it answered with status {response.status_code}"
            ) from None
        raise made_error(refusal.error, f"the learner at {self.url} refuses: {refusal.message}")


def made_error(name: str, message: str) -> TrainerError:
    """Return the error of a class of trainer/errors.py; a LearnerServiceError if there is no such class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TrainerError):
        return kind(message)
    return LearnerServiceError(f"{name}: {message}")


# AgentLearner: one agent's learner; implements LearnerProtocol. Imports no torch.
#
# It opens the agent with its first operation. If the connection or the agent's state is lost, the operation raises
# LearnerUnreachable and nothing is sent again. The next operation opens the agent again by itself if its state is that
# of a checkpoint: it was loaded or saved and not trained since. Otherwise it raises LearnerUnreachable until `load`.

log = logging.getLogger(__name__)


class LearnerOperations(Protocol):
    """Runs the operations of a learner: over HTTP, or in process (`trainer/local_learner.py`)."""

    def status(self) -> LearnerStatus: ...

    def run(
        self, request: OperationRequest, on_progress: Callable[[InProgress], None] = lambda progress: None
    ) -> Answer: ...


class AgentLearner:
    """The learner of one agent. One thread at a time may train, save and load; others may score beside it.

    `share` is the agent's share of the compute time, and `base_model` the digests of its base model's files by part.
    Its methods raise what those of `LearnerHost` raise, and LearnerUnreachable.
    """

    def __init__(
        self,
        connection: LearnerOperations,
        agent: str,
        settings: LearnerSettings,
        source: str | Path | None = None,
        *,
        share: float = 1.0,
        base_model: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connection = connection
        self._agent = agent
        self._share = share
        self._base_model = base_model
        self._settings = settings
        self._source = _reference(source)
        self._saved = True  # the learner's state is that of `_source`
        self._lock = threading.RLock()
        self._state = ""  # the id of the learner's state; empty: not open
        self._step = 0
        self._limits: ModelLimits | None = None
        self._progress = Progress()

    @property
    def step(self) -> int:
        """Optimizer steps of the agent; 0 before its first operation."""
        return self._step

    def report_progress_to(self, progress: Progress) -> None:
        self._progress = progress

    def unfit(self, row: TokenRow) -> str | None:
        """Return why the base model cannot be trained on a row; None if it can."""
        if self._limits is None:
            self._limits = self._connection.status().limits
        if self._limits is None:
            raise LearnerUnreachable("the learner is loading its base model")
        return unfit(self._limits, row)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train on the rows once; never tries again."""
        state = self._opened()
        self._saved = False
        phase = self._progress.begin(TRAINING, len(rows))

        def watch(progress: InProgress) -> None:
            if progress.ahead:
                log.info("event=learner_waiting agent=%s ahead=%d", self._agent, progress.ahead)
            elif progress.rows:
                phase.at(min(progress.rows, len(rows)), len(rows))

        try:
            answer = self._run("train", TrainRequest(tuple(rows), rate_scale), state, watch)
        finally:
            phase.end()
        return msgspec.msgpack.decode(answer.result, type=RoundReport)

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path | str = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of each row, as `LearnerHost.score` does; a text or path is a checkpoint's reference."""
        ids = tuple(tuple(row.ids if isinstance(row, TokenRow) else row) for row in rows)
        masks = tuple(bytes(row.mask) if isinstance(row, TokenRow) else b"" for row in rows)
        scored_with = adapter if isinstance(adapter, bool) else str(adapter)
        request = ScoreRequest(ids, scored_with, masks if any(masks) else ())
        return msgspec.msgpack.decode(self._run("score", request, self._opened()).result, type=list[tuple[float, ...]])

    def save(self, target: str | Path) -> None:
        """Write a checkpoint to a new reference."""
        reference = str(_reference(target))
        self._run("save", SaveRequest(reference), self._opened())
        self._source, self._saved = reference, True

    def load(self, source: str | Path | None, settings: LearnerSettings) -> None:
        """Take the state of a checkpoint; None: of a new adapter. The base model stays loaded."""
        self._drop(self._state)
        self._source, self._settings, self._saved = _reference(source), settings, True
        self._opened()

    def close(self) -> None:
        """Let the learner forget the agent; a learner that does not answer is left alone."""
        state = self._state
        if state:
            try:
                self._run("close", None, state)
            except LearnerServiceError as error:
                log.info("event=learner_not_closed agent=%s reason=%r", self._agent, str(error))
            self._drop(self._state)

    def _opened(self) -> str:
        """Return the id of the agent's state; open the agent if it is not. Raises LearnerUnreachable."""
        with self._lock:
            if self._state:
                return self._state
            if not self._saved:
                raise LearnerUnreachable(
                    f"the learner lost the state of {self._agent}: its newest commit must be loaded"
                )
            request = OpenRequest(self._settings, self._source, __version__, dict(self._base_model))
            self._limits = None  # of the learner that runs now
            return self._run("open", request, "").state

    def _run(
        self, verb: Verb, request: Any, state: str, on_progress: Callable[[InProgress], None] = lambda progress: None
    ) -> Answer:
        """Run a verb; an outage means that the learner's state is unknown."""
        arguments = msgspec.Raw(encode(request))
        wanted = OperationRequest(self._agent, verb, arguments, state, self._share)
        try:
            answer = self._connection.run(wanted, on_progress)
        except LearnerServiceError:
            self._drop(state)
            raise
        with self._lock:
            if answer.state and verb in ("open", "train") and self._state == state:
                self._state, self._step = answer.state, answer.step
        if answer.error is None:
            return answer
        error = made_error(answer.error, answer.message)
        if isinstance(error, LearnerServiceError):
            self._drop(state)
        raise error

    def _drop(self, state: str) -> None:
        with self._lock:
            if self._state == state:
                self._state = ""


def _reference(source: str | Path | None) -> str | None:
    """Return a reference as text; a path is made absolute, because the learner has another working folder."""
    return str(source.absolute()) if isinstance(source, Path) else source


# LearnerAccess: the learner that a trainer process uses; found at `learner.url`, or started as a child process.
#
# Promises: a child ends with the trainer, however that ends (its command runs under the process guard, which reads the
# pipe that only the trainer holds), and is started again, later each time, if it exits; after `max_restarts` exits in
# ten minutes the trainer stops with the reason. Several controllers may use one learner, but a base model has one
# learner: the store has a lease of the learner's instance, which each of its controllers renews, and a controller of
# another learner stops with the address of the first. Nothing here waits: until the learner is known, the operations of
# the agents raise LearnerUnreachable. Imports no torch.

UNREACHABLE = "learner_unreachable"  # alarm

_POLL_SECONDS = 0.2
_MAX_DELAY = 30.0  # seconds before a restart
RESTART_WINDOW_SECONDS = 600.0
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


class RestartBackoff:
    """Counts the exits of one service. Pure; `now` is monotonic seconds."""

    def __init__(self, max_restarts: int) -> None:
        self.count = 0
        self._max_restarts = max_restarts
        self._times: deque[float] = deque()

    def record_exit(self, now: float) -> float | None:
        """Record an exit; return the delay in seconds before the restart, None to give the service up."""
        self.count += 1
        self._times.append(now)
        while now - self._times[0] > RESTART_WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) > self._max_restarts:
            return None
        return float(min(_MAX_DELAY, 2 ** (len(self._times) - 1)))


class LearnerChild:
    """A learner as a child process that is started again if it exits. Not thread-safe."""

    def __init__(self, command: LearnerCommand) -> None:
        self._command = command
        self._token = secrets.token_urlsafe(32)
        self._exits = RestartBackoff(command.max_restarts)
        self._restart_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
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
        delay = self._exits.record_exit(now)
        if delay is None:
            raise LearnerServiceError(
                f"the learner exited {self._command.max_restarts + 1} times within {RESTART_WINDOW_SECONDS / 60:.0f} "
                f"minutes, the last time with code {code}: its log {self._command.log} says why"
            )
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

    def learner_of(self, settings: TrainerSettings, source: Path | str | None) -> AgentLearner:
        """Return the learner of one agent, resumed from a checkpoint; a LearnerFactory."""
        return AgentLearner(
            self._connection, settings.model, settings.learner, source, share=settings.share, base_model=self._digests
        )

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
        """Return whether this learner has the base model's lease. Raises LearnerServiceError."""
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
            raise LearnerServiceError(
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
