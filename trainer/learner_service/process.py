"""The learner's process: rank 0 serves controllers over HTTP, the other processes of its group follow it.

Returns exit code 0 after SIGTERM or SIGINT, 1 after an error with one log line that says why.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet import __version__
from ratchet.trainer.adapters.adapter_store import MAX_CACHE_BYTES, AdapterStore
from ratchet.trainer.adapters.base_model_files import digests, model_folder
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner_api.messages import TOKEN_VARIABLE
from ratchet.trainer.learner_service import launch
from ratchet.trainer.learner_service.checkpoint_references import LocalReferences, StoredReferences
from ratchet.trainer.learner_service.group_check import LearnerProcessIdentity, compare_processes
from ratchet.trainer.learner_service.server import LearnerServer, ServiceAddress, new_status, serve
from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings

if TYPE_CHECKING:
    from ratchet.trainer.learner import distributed
    from ratchet.trainer.learner.host import LearnerHost

log = logging.getLogger(__name__)


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
        if launch.rank(environ):
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
    references = StoredReferences(LocalReferences(*folders.checkpoints), adapters, folders.url)
    group = _HostGroup(base_model, process)
    with address.bind() as listener:
        status = new_status(base_model, files, listener, process.sharding, process.num_processes, process.machines)
        return serve(LearnerServer(group.make_host, references, address, status, group.close), listener)


class _HostGroup:
    """The host of rank 0, and its channel to the other processes. Used in the compute thread."""

    def __init__(self, base_model: str, process: LearnerProcessSettings) -> None:
        self._base_model = base_model
        self._process = process
        self._channel: distributed.FollowerChannel | None = None

    def make_host(self) -> LearnerHost:
        """Load the base model in all processes."""
        from ratchet.trainer.learner import distributed
        from ratchet.trainer.learner.host import LearnerHost

        if not launch.is_worker(os.environ):
            return LearnerHost(self._base_model, self._process)
        self._channel = distributed.FollowerChannel()
        return distributed.LeadingHost(self._channel, self._base_model, self._process)

    def close(self) -> None:
        """Let the other processes end."""
        if self._channel is not None:
            self._channel.close()


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
