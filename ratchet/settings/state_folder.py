"""The paths of a project's state: `.ratchet/<project>/`.

The folder is readable by its owner only (0700), since it holds recorded conversations.
"""

from __future__ import annotations

import errno
import getpass
import shutil
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import CliError

SERVICES = ("vllm", "proxy", "learner", "trainer")


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The paths of one project."""

    root: Path

    @property
    def store(self) -> Path:
        """The SQLite file of a project that sets no other store."""
        return self.root / "store.db"

    @property
    def journal(self) -> Path:
        """The proxy's journal."""
        return self.root / "journal"

    def checkpoints(self, alias: str) -> Path:
        """The adapter versions of an alias, one folder each."""
        return self.models / alias / "checkpoints"

    @property
    def models(self) -> Path:
        """The adapter versions of all aliases."""
        return self.root / "models"

    @property
    def learner(self) -> Path:
        """Working files of the learner's libraries."""
        return self.root / "learner"

    def base_digests(self, alias: str) -> Path:
        """The cached digests of the base model's files."""
        return self.checkpoints(alias).with_name("base_model.json")

    @property
    def adapter_cache(self) -> Path:
        """Local copies of versions in object storage."""
        return self.root / "adapter_cache"

    @property
    def tasks(self) -> Path:
        """The imported task sets, one folder each."""
        return self.root / "tasks"

    def log(self, service: str) -> Path:
        """A service's log."""
        return self.root / "logs" / f"{service}.log"

    def pid(self, name: str) -> Path:
        """A pid file: of a service, of its guard (`<service>.process_guard`), or of `ratchet up` itself (`up`)."""
        return self.root / "run" / f"{name}.pid"

    @property
    def running(self) -> Path:
        """The run state that `ratchet up` writes: URLs, pids, exits (JSON)."""
        return self.root / "run" / "running.json"

    @property
    def resolved(self) -> Path:
        """The resolved settings of the services, without secrets (JSON)."""
        return self.root / "run" / "settings.json"

    @property
    def resolved_models_only(self) -> Path:
        """The same of a proxy that was started for one run on models of `model_list`."""
        return self.root / "run" / "models_only.json"

    @property
    def learner_token(self) -> Path:
        """The bearer token that `ratchet up` made for its learner, readable by the owner only, while it runs."""
        return self.root / "run" / "learner.token"

    @property
    def judges(self) -> Path:
        """The addresses of judge functions that processes of tuning runs serve, one file each."""
        return self.root / "run" / "judges"

    @property
    def lock(self) -> Path:
        """The lock file of `ratchet up`."""
        return self.root / "run" / "up.lock"

    def make(self, *, min_free_disk_mb: int) -> None:
        """Create the folders. Raises CliError if this fails or fewer than `min_free_disk_mb` megabytes are free."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
            for folder in (self.root / "logs", self.root / "run", self.journal):
                folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free the disk, or set" if full else "set"
            raise CliError(
                f"the state folder {self.root} cannot be created: {error.strerror} ({error.filename}); {remedy} "
                "`state_dir` (RATCHET_STATE_DIR) to a folder that this user may write"
            ) from error
        if free < min_free_disk_mb * 1_000_000:
            raise CliError(
                f"the disk of {self.root} has {free // 1_000_000} MB free, and {min_free_disk_mb} MB are required "
                "(min_free_disk_mb): free the disk, or set `state_dir` to another folder"
            )


def current_user() -> str:
    """Return the user's name, for records of decisions."""
    try:
        return getpass.getuser()
    except OSError:  # a container may run under a number without a name
        return "a person"
