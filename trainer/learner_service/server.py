"""The learner's server: binds its address, loads the base model in the compute thread, and serves until SIGTERM.

It answers from the start, so that `/health` says whether the base model is loading. Without a token it listens on a
loopback address only.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

import msgspec
import uvicorn

from ratchet import __version__
from ratchet.trainer.errors import SettingError, TrainerError
from ratchet.trainer.learner_api.messages import TOKEN_VARIABLE, LearnerStatus
from ratchet.trainer.learner_api.protocol import AgentHost
from ratchet.trainer.learner_service.app import LearnerApp
from ratchet.trainer.learner_service.checkpoint_references import CheckpointReferences
from ratchet.trainer.learner_service.compute_thread import ComputeThread, Operation
from ratchet.trainer.learner_service.metrics import LearnerMetrics
from ratchet.trainer.learner_service.operations import AgentOperations
from ratchet.trainer.learner_service.sessions import AgentSessions

log = logging.getLogger(__name__)
start = logging.getLogger("ratchet.start")  # logged at any log_level

_STOP_SECONDS = 5.0  # that the running operation gets when the learner stops
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where the service listens, and its bearer token. Port 0: any free one. Raises SettingError."""

    host: str
    port: int
    token: str | None
    max_body_mb: int = 1024

    def __post_init__(self) -> None:
        if self.token is None and not _is_loopback(self.host):
            raise SettingError(
                f"learner.host {self.host} can be reached from other machines, and a client of the learner can train "
                f"and write checkpoints: set {TOKEN_VARIABLE} for the learner and its controllers, or use 127.0.0.1"
            )

    def bind(self) -> socket.socket:
        """Return the listening socket. Raises SettingError if the address cannot be used."""
        try:
            return socket.create_server(
                (self.host, self.port),
                family=socket.AF_INET6 if ":" in self.host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise SettingError(
                f"learner.host {self.host}, learner.port {self.port}: {error.strerror or error}; choose another port, "
                "or 0 for any free one"
            ) from error


class LearnerServer:
    """One learner's service. `base` is its status before the base model is loaded.

    `make_host` loads the base model, and `release` ends what the host needs; both run in the compute thread.
    """

    def __init__(
        self,
        make_host: Callable[[], AgentHost],
        references: CheckpointReferences,
        address: ServiceAddress,
        base: LearnerStatus,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_host = make_host
        self._references = references
        self._release = release
        self._base = base
        self._sessions = AgentSessions()
        self._metrics = LearnerMetrics(self._sessions)
        self.thread = ComputeThread(self._make_operations, self._end, self._count)
        max_body = address.max_body_mb * 2**20
        self.app = LearnerApp(self.thread, self._sessions, self._metrics, self.status, address.token, max_body).asgi
        self._error: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None

    def status(self) -> LearnerStatus:
        """Return the learner's status without its agents."""
        return msgspec.structs.replace(self._base, ready=self.thread.ready)

    def raise_error(self) -> None:
        """Raise the error that ended the compute thread, if there was one."""
        if self._error is not None:
            raise self._error

    def _make_operations(self) -> AgentOperations:
        host = self._make_host()
        self._base = msgspec.structs.replace(self._base, limits=host.limits)
        start.info("event=learner_ready instance=%s base_model=%s", self._base.instance, self._base.base_model)
        return AgentOperations(host, self._sessions, self._references)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        if error is None:
            self._release()
        self.on_end()

    def _count(self, operation: Operation, seconds: float) -> None:
        self._metrics.count(operation, seconds)
        session = self._sessions.of_agent(operation.agent)
        if session is not None:
            session.seconds += seconds


def new_status(
    base_model: str, digests: Mapping[str, str], listener: socket.socket, sharding: str, processes: int, machines: int
) -> LearnerStatus:
    """Return the status of a learner that starts now. Its instance names host and port, and differs per start."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    instance = f"{name}:{port}:{secrets.token_hex(4)}"
    return LearnerStatus(
        instance, __version__, base_model, dict(digests), False, sharding, processes, machines, None, None, ()
    )


def serve(server: LearnerServer, listener: socket.socket) -> int:
    """Serve until SIGTERM, SIGINT or an error; return the exit code."""

    def note(signum: int, _: FrameType | None) -> None:
        log.info("event=stopping signal=%s", signal.Signals(signum).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)  # uvicorn passes the signal on after it has stopped
    config = uvicorn.Config(
        server.app, http="httptools", loop="uvloop", log_config=None, access_log=False, ws="none", lifespan="off",
        timeout_keep_alive=75,  # longer than clients keep idle connections
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    http = uvicorn.Server(config)

    def stop() -> None:
        http.should_exit = True

    server.on_end = stop
    host, port = listener.getsockname()[:2]
    log.info("event=learner_listening host=%s port=%d", host, port)
    server.thread.start()
    http.run(sockets=[listener])
    stopped = server.thread.stop(_STOP_SECONDS)
    try:
        server.raise_error()
    except TrainerError as error:
        log.error("event=learner_stopped error=%s reason=%r", type(error).__name__, str(error))
        return 1
    log.info("event=learner_stopped")
    if not stopped:  # a round cannot be interrupted, and its state is not needed: nothing of it is committed
        logging.shutdown()
        os._exit(0)
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
