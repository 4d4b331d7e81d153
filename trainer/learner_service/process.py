"""The process of a learner: its checks before the start, its server, and its ranks."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ratchet import __version__
from ratchet.trainer.adapters.adapter_store import MAX_CACHE_BYTES, AdapterStore
from ratchet.trainer.adapters.base_model_files import digests, model_folder
from ratchet.trainer.errors import LearnerServiceError, SettingError, TrainerError, WorkerProcessLost
from ratchet.trainer.learner import launch
from ratchet.trainer.learner_api import TOKEN_VARIABLE, LearnerStatus
from ratchet.trainer.learner_service.operations import CheckpointReferences
from ratchet.trainer.learner_service.service import LearnerApp, LearnerService
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings

if TYPE_CHECKING:
    from ratchet.trainer.learner.host import LearnerHost

# Compares the processes of a learner before they load anything: version of Ratchet and files of the base model.
#
# Each process publishes what it is in the launcher's key-value store; process 0 compares, and all of them end with one
# error if one differs. Torch is imported by `compare_processes`.

_TIMEOUT = timedelta(minutes=30)  # digests of a large base model on a slow disk
_PREFIX = "ratchet/identity"


@dataclass(frozen=True, slots=True)
class LearnerProcessIdentity:
    """What must be the same in all processes of a learner; `host` is where this one runs."""

    host: str
    version: str
    base_model: str
    digests: Mapping[str, str]


def difference(first: LearnerProcessIdentity, other: LearnerProcessIdentity) -> str | None:
    """Return how a process differs from process 0; None if it may take part."""
    if first.version != other.version:
        return (
            f"Ratchet {other.version} is installed on {other.host}, and {first.version} on {first.host}: install the "
            "same version on every machine of the learner"
        )
    parts = sorted(part for part, digest in first.digests.items() if other.digests.get(part) != digest)
    if parts:
        return (
            f"base_model {other.base_model} on {other.host} is not {first.base_model} on {first.host}: its "
            f"{', '.join(parts)} differ; give every machine of the learner the same files"
        )
    return None


def compare_processes(own: LearnerProcessIdentity, environ: Mapping[str, str]) -> None:
    """Return once all processes are known to be alike. Raises LearnerServiceError in all of them, WorkerProcessLost."""
    import torch.distributed

    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if count == 1:
        return
    try:
        store = torch.distributed.PrefixStore(
            _PREFIX,
            torch.distributed.TCPStore(
                environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT
            ),
        )
        store.set(str(rank), json.dumps(asdict(own)))
        if rank == 0:
            others = [LearnerProcessIdentity(**json.loads(store.get(str(other)))) for other in range(1, count)]
            found = (text for other in others if (text := difference(own, other)) is not None)
            store.set("verdict", next(found, ""))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise WorkerProcessLost(f"the processes of the learner did not find each other: {error}") from error
    if verdict:
        raise LearnerServiceError(verdict)


# The learner's server: binds its address, loads the base model in the compute thread, and serves until SIGTERM.
#
# It answers from the start, so that `/health` says whether the base model is loading. Without a token it listens on a
# loopback address only.

log = logging.getLogger(__name__)

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


def new_status(
    base_model: str, digests: Mapping[str, str], listener: socket.socket, sharding: str, processes: int, machines: int
) -> LearnerStatus:
    """Return the status of a learner that starts now. Its instance names host and port, and differs per start."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    instance = f"{name}:{port}:{secrets.token_hex(4)}"
    return LearnerStatus(instance, __version__, base_model, dict(digests), sharding, processes, machines)


def serve(service: LearnerService, address: ServiceAddress, listener: socket.socket) -> int:
    """Serve until SIGTERM, SIGINT or an error; return the exit code."""

    def note(signum: int, _: FrameType | None) -> None:
        log.info("event=stopping signal=%s", signal.Signals(signum).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)  # uvicorn passes the signal on after it has stopped
    app = LearnerApp(service, address.token, address.max_body_mb * 2**20)
    config = uvicorn.Config(
        app.asgi, http="httptools", loop="uvloop", log_config=None, access_log=False, ws="none", lifespan="off",
        timeout_keep_alive=75,  # longer than clients keep idle connections
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    http = uvicorn.Server(config)

    def stop() -> None:
        http.should_exit = True

    service.on_end = stop
    host, port = listener.getsockname()[:2]
    log.info("event=learner_listening host=%s port=%d", host, port)
    service.start()
    http.run(sockets=[listener])
    stopped = service.stop(_STOP_SECONDS)
    if service.error is not None and not isinstance(service.error, TrainerError):
        raise service.error
    if service.error is not None:
        log.error("event=learner_stopped error=%s reason=%r", type(service.error).__name__, str(service.error))
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


# The learner's process: rank 0 serves controllers over HTTP, the other processes of its group follow it.
#
# Returns exit code 0 after SIGTERM or SIGINT, 1 after an error with one log line that says why.


@dataclass(frozen=True, slots=True)
class LearnerFolders:
    """`work` holds the cache of adapters; `digests` is a file; checkpoints are written under `checkpoints` only, and
    below `url`, a place in object storage.
    """

    work: Path
    digests: Path
    checkpoints: Sequence[Path] = ()
    url: str | None = None
    max_cache_bytes: int = MAX_CACHE_BYTES


def run(
    base_model: str, process: LearnerProcessSettings, folders: LearnerFolders, environ: Mapping[str, str] = os.environ
) -> int:
    """Run one process of a learner until SIGTERM, SIGINT or an error; return the exit code.

    A process of a group that has lost another one does not return: torch's destructors may wait for the lost one.
    """
    code = _run(base_model, process, folders, environ)
    if code and launch.is_worker(environ):
        logging.shutdown()
        os._exit(code)
    return code


def _run(base_model: str, process: LearnerProcessSettings, folders: LearnerFolders, environ: Mapping[str, str]) -> int:
    try:
        files = _digests(base_model, folders.digests)
        if launch.is_worker(environ):
            identity = LearnerProcessIdentity(socket.gethostname(), __version__, base_model, files)
            compare_processes(identity, environ)
        if launch.is_worker(environ) and launch.rank():
            return _follow()
        return _lead(base_model, process, folders, files, environ)
    except TrainerError as error:
        log.error("event=learner_stopped error=%s reason=%r", type(error).__name__, str(error))
        return 1


def _lead(
    base_model: str,
    process: LearnerProcessSettings,
    folders: LearnerFolders,
    files: Mapping[str, str],
    environ: Mapping[str, str],
) -> int:
    token = environ.get(TOKEN_VARIABLE) or None
    address = ServiceAddress(process.host, process.port, token, process.max_body_mb)
    adapters = AdapterStore(folders.work / "adapter_cache", folders.max_cache_bytes)
    references = CheckpointReferences(*folders.checkpoints, adapters=adapters, url=folders.url)

    def make_host() -> LearnerHost:
        from ratchet.trainer.learner import distributed
        from ratchet.trainer.learner.host import LearnerHost

        if launch.is_worker(environ):
            return distributed.LeadingHost(distributed.FollowerChannel(), base_model, process)
        return LearnerHost(base_model, process)

    with address.bind() as listener:
        status = new_status(base_model, files, listener, process.sharding, process.num_processes, process.machines)
        return serve(LearnerService(make_host, references, status), address, listener)


def _follow() -> int:
    from ratchet.trainer.learner import distributed

    return distributed.follow(distributed.FollowerChannel())


def _digests(base_model: str, cache: Path) -> dict[str, str]:
    """Return the digests of the base model's files; empty for a model that is not downloaded yet."""
    folder = model_folder(base_model)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    return digests(folder, cache)
