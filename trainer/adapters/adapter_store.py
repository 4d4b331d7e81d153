"""AdapterStore: where the versions of agents are kept, in a local folder or in object storage.

A reference names one version: the path of its folder (`/state/models/mail/checkpoints/0007`) or its URL
(`s3://bucket/prefix/mail/checkpoints/0007`). The store's columns hold references, so a project may change
`adapters.store`: older versions stay where they are. A `root` is the folder or URL above an agent's versions.

Promises that a version is published whole or not at all, is never overwritten, and is verified when it is fetched. A
local folder keeps the layout of `checkpoint.py` and is used in place; nothing is copied. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path

from ratchet.trainer.adapters import checkpoint, object_store
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files as adapter_files
from ratchet.trainer.errors import AdapterStoreUnreachable, CheckpointDamaged
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 20_000_000_000
_PAUSES = (1.0, 4.0)  # seconds between the attempts to publish


def is_remote(reference: str) -> bool:
    return "://" in reference


class AdapterStore:
    """Publishes and fetches versions by reference. `cache` is the folder for copies of remote ones."""

    def __init__(
        self, cache: Path, max_cache_bytes: int = MAX_CACHE_BYTES, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._cache = cache
        self._max_cache_bytes = max_cache_bytes
        self._sleep = sleep

    def next_reference(self, root: str, at_least: int = 1) -> str:
        """Return the reference of a new version under `root`: a number that the place never held.

        Raises CheckpointError.
        """
        if is_remote(root):
            return f"{root}/{max(at_least, object_store.next_number(root)):04d}"
        folder = Path(root).absolute()
        return str(folder / f"{max(at_least, int(checkpoint.next_path(folder).name)):04d}")

    def complete(self, reference: str) -> bool:
        """Return whether every file of the version is there with its size. Raises as `next_reference` does."""
        return object_store.is_complete(reference) if is_remote(reference) else checkpoint.complete(Path(reference))

    def publish(self, folder: Path, reference: str) -> None:
        """Publish a complete local checkpoint under a new reference. The same content again is no error.

        Raises CheckpointError; AdapterStoreUnreachable after several attempts: nothing is published then, and it can
        be repeated.
        """
        if not checkpoint.complete(folder):
            raise CheckpointDamaged(f"{folder} is not a complete checkpoint; nothing was published")
        if not is_remote(reference):
            if folder.absolute() != Path(reference).absolute():
                _copy(folder, Path(reference))
            return
        for pause in _PAUSES:
            try:
                object_store.publish(folder, reference)
            except AdapterStoreUnreachable as outage:
                log.warning("event=adapter_not_published retry_seconds=%.0f reason=%r", pause, str(outage))
                self._sleep(pause)
            else:
                return
        object_store.publish(folder, reference)

    def write(self, reference: str, save: Callable[[Path], None]) -> None:
        """Publish what `save` writes into a new local folder under a new reference. Raises as `publish` does, and what
        `save` raises: nothing is published then.
        """
        if not is_remote(reference):
            save(Path(reference))
            return
        folder = self._cache.with_name("unpublished") / f"{uuid.uuid4().hex}"
        try:
            save(folder)
            self.publish(folder, reference)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        """Return a local folder with the version, verified; without `state`, only what vLLM needs.

        A local version is used in place. Raises CheckpointError, also if the local disk is
        full.
        """
        if is_remote(reference):
            return object_store.fetch(reference, self._cache, state=state, max_cache_bytes=self._max_cache_bytes)
        if not checkpoint.complete(Path(reference)):
            raise CheckpointDamaged(f"{reference} is missing or incomplete; go on from another version")
        return Path(reference)

    def verify(self, reference: str) -> None:
        """Raise CheckpointDamaged if a file of the version is missing or its SHA-256 is not the manifest's.

        Does nothing for a version that `is_here` does not find. Raises as `fetch` does.
        """
        if not is_remote(reference):
            if self.is_here(reference):
                checkpoint.verify(Path(reference))
            return
        self._cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache.parent) as fresh:  # a copy in the cache may be older
            object_store.fetch(reference, Path(fresh), state=False, max_cache_bytes=self._max_cache_bytes)

    def is_here(self, reference: str) -> bool:
        """Return whether this machine can read the versions beside this one: a local store may be another's."""
        return is_remote(reference) or Path(reference).parent.is_dir()

    def prune(self, root: str, folders: Set[int], states: Set[int]) -> tuple[int, ...]:
        """Remove the versions not in `folders`, and the learner's state from those not in `states`; return the
        numbers of the removed versions.
        """
        if is_remote(root):
            return object_store.prune(root, folders, states)
        return checkpoint.prune(Path(root), folders, states)

    def remove_incomplete(self, root: str) -> tuple[str, ...]:
        """Remove what interrupted writers left under `root`; return it."""
        if is_remote(root):
            return object_store.remove_incomplete(root)
        return tuple(map(str, checkpoint.remove_incomplete(Path(root))))

    def check(self, root: str) -> None:
        """Raise CheckpointError if versions cannot be written to `root` and read from it."""
        if is_remote(root):
            object_store.check(root)
        else:
            checkpoint.check_writable(Path(root))


@contextlib.contextmanager
def amplified(reference: str, factor: float) -> Iterator[str]:
    """Yield the reference of an amplified copy of a version: the same weights with `lora_alpha` times `factor`.

    It is for vLLM and for `fetch`, and is gone afterwards; in object storage nothing is written. Raises
    CheckpointDamaged, CheckpointError.
    """
    if is_remote(reference):
        yield f"{reference}x{factor:g}"
        return
    folder = Path(reference)
    with checkpoint.temporary_copy(folder, f"x{factor:g}", partial(_amplify, folder, factor)) as copy:
        yield str(copy)


def weights_checksum(reference: str) -> str | None:
    """Return the SHA-256 of a version's weights file, which is also its manifest's; None if the file is not here,
    or in object storage, where the plug-in for vLLM verifies it. Raises CheckpointDamaged.
    """
    if is_remote(reference) or not Path(reference).parent.is_dir():
        return None
    return checkpoint.verified_digest(Path(reference), adapter_files.WEIGHTS)


def make_adapter_store(settings: TrainerSettings) -> AdapterStore:
    cache = settings.checkpoints.parent / "adapter_cache"
    return AdapterStore(cache, settings.adapters.max_cache_bytes)


def number_of(reference: str) -> int:
    return int(reference.rstrip("/").rpartition("/")[2])


def _amplify(folder: Path, factor: float, target: Path) -> None:
    try:
        adapter_files.amplify(folder, target, factor)
    except (adapter_files.DamagedAdapter, FileNotFoundError) as error:
        raise CheckpointDamaged(f"no amplified copy of {folder} can be made: {error}") from error


def _copy(folder: Path, target: Path) -> None:
    def write(aside: Path) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, aside / entry.name)
            elif entry.name != checkpoint.MANIFEST:
                shutil.copyfile(entry, aside / entry.name)

    checkpoint.write_atomically(target, write)
