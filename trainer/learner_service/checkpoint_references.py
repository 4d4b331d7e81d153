"""References of checkpoints as local folders: a learner's host reads and writes folders only.

A reference is what the store records of a version's checkpoint: a path, which is used as it is, or a URL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote
from ratchet.trainer.errors import LearnerRefused


class CheckpointReferences(Protocol):
    """Resolves references."""

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the local folder of a complete checkpoint; without `state`, of its adapter."""
        ...

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Publish under a new reference the checkpoint that `save` writes into a new local folder."""
        ...


class LocalReferences:
    """References that are paths. Checkpoints are only written under `roots`; without any, everywhere.

    Checksums are verified when a checkpoint is read for the first time, unless this process wrote it.
    """

    def __init__(self, *roots: Path) -> None:
        self._roots = tuple(root.absolute() for root in roots)
        self._verified: set[str] = set()

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the folder. Raises CheckpointDamaged if a checksum is wrong."""
        folder = Path(reference)
        if reference not in self._verified and (folder / checkpoint.MANIFEST).is_file():
            checkpoint.verify(folder)
            self._verified.add(reference)
        return folder

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Let `save` write the folder. Raises LearnerRefused for a folder outside of the roots."""
        folder = Path(reference)
        if not folder.is_absolute() or ".." in folder.parts:
            raise LearnerRefused(f"checkpoint {reference} is not an absolute path without `..`")
        if self._roots and not any(folder.is_relative_to(root) for root in self._roots):
            allowed = ", ".join(map(str, self._roots))
            raise LearnerRefused(
                f"checkpoint {reference} is outside of {allowed}, where this learner writes: start it with the "
                "controller's state_dir and adapters.store"
            )
        save(folder)
        self._verified.add(reference)


class StoredReferences:
    """References that are paths, or URLs below `url`, the object storage in the learner's own settings."""

    def __init__(self, local: LocalReferences, adapters: AdapterStore, url: str | None) -> None:
        self._local = local
        self._adapters = adapters
        self._url = url

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return the folder, or a verified local copy. Raises CheckpointError, LearnerRefused."""
        if not is_remote(reference):
            return self._local.fetch(reference, state=state)
        return self._adapters.fetch(self._allowed(reference), state=state)

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Let `save` write the folder, or publish what it writes. Raises CheckpointError, LearnerRefused."""
        if is_remote(reference):
            self._adapters.write(self._allowed(reference), save)
        else:
            self._local.write(reference, save)

    def _allowed(self, reference: str) -> str:
        if self._url is None or not reference.startswith(f"{self._url}/") or ".." in reference.split("/"):
            raise LearnerRefused(
                f"version {reference} is outside of this learner's object storage, {self._url or 'none'}: start it "
                "with the controller's adapters.store"
            )
        return reference
