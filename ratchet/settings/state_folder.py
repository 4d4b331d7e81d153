"""Where a project's state lives: `.ratchet/<project>/`. Names only; nothing is read or written but the folders.

The state folder is for its owner alone (0700): it holds what agents said.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import DiskFull

ROOMS = ("vllm", "proxy", "trainer")


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The paths of one project."""

    root: Path

    @property
    def store(self) -> Path:
        """The SQLite file of a project that names no other store."""
        return self.root / "store.db"

    @property
    def journal(self) -> Path:
        """The proxy's journal."""
        return self.root / "journal"

    def checkpoints(self, alias: str) -> Path:
        """The adapter versions of an alias, one folder each."""
        return self.root / "models" / alias / "checkpoints"

    def base_digests(self, alias: str) -> Path:
        """The digests of the base model's files, as they were when they were read."""
        return self.checkpoints(alias).with_name("base_model.json")

    @property
    def tasks(self) -> Path:
        """The imported task sets, one folder each."""
        return self.root / "tasks"

    def log(self, room: str) -> Path:
        """A room's log."""
        return self.root / "logs" / f"{room}.log"

    def pid(self, name: str) -> Path:
        """A pid file: of a room, of its process_guard (`<room>.process_guard`), or of `ratchet up` itself (`up`)."""
        return self.root / "run" / f"{name}.pid"

    @property
    def running(self) -> Path:
        """What `ratchet up` started: ports, commands, versions (JSON)."""
        return self.root / "run" / "running.json"

    @property
    def resolved(self) -> Path:
        """The settings that the rooms were started with, without secrets (YAML)."""
        return self.root / "run" / "settings.yaml"

    @property
    def lock(self) -> Path:
        """Held by `ratchet up` as long as it lives."""
        return self.root / "run" / "up.lock"

    def make(self, *, min_free_disk_mb: int) -> None:
        """Make the folders. Raises DiskFull where fewer than `min_free_disk_mb` megabytes are free or writing fails."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
            for folder in (self.root / "logs", self.root / "run", self.journal):
                folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free the disk, or set" if full else "set"
            raise DiskFull(
                f"the state folder {self.root} cannot be made: {error.strerror} ({error.filename}); {remedy} `folder` "
                "(RATCHET_FOLDER) to one that this user may write"
            ) from error
        if free < min_free_disk_mb * 1_000_000:
            raise DiskFull(
                f"the disk of {self.root} has {free // 1_000_000} MB free and {min_free_disk_mb} MB are wanted "
                "(min_free_disk_mb): free the disk, or set `folder` to another one"
            )
