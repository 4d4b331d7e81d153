"""Versions in object storage: `s3://bucket/prefix/<agent>/checkpoints/NNNN/`, each complete or not there.

The file systems are fsspec's, each with a package of its own. Promises that the manifest is written last, so that no
reader sees half a version; that a published version is never overwritten; and that every failure is one of our errors,
with the remedy. `url` is the URL of one version, `root` of the folder that holds an agent's versions.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
import uuid
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from ratchet.store.errors import install_hint
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files as adapter_files
from ratchet.trainer.errors import (
    AdapterStoreUnreachable,
    CheckpointDamaged,
    CheckpointError,
)

_NUMBERED = re.compile(r"\d{4,}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ABANDONED_SECONDS = 3600.0  # a younger version without a manifest may be on its way
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}


def publish(folder: Path, url: str) -> None:
    """Upload a complete local checkpoint. Does nothing if the same one is there.

    Raises CheckpointError if another one is there or the store is full, CheckpointDamaged if a file of `folder` is not
    the manifest's, AdapterStoreUnreachable.
    """
    manifest = (folder / adapter_files.MANIFEST).read_bytes()
    with translated_errors(url):
        files = adapter_files.parse_manifest(manifest, str(folder))
        for name, (size, digest) in files.items():
            if (folder / name).stat().st_size != size or adapter_files.digest_of(folder / name) != digest:
                raise CheckpointDamaged(
                    f"{folder / name} is not the file that the manifest names; nothing was uploaded"
                )
        store, path = adapter_files.open_url(url)
        there = _read_manifest(store, path)
        if there is not None:
            if there == manifest:
                return
            raise CheckpointError(f"{url} exists: versions are never overwritten, save under a new number")
        for parent in {Path(name).parent.as_posix() for name in files}:
            _make_folder(store, url, f"{path}/{parent}")
        store.put([str(folder / name) for name in files], [f"{path}/{name}" for name in files])
        store.pipe_file(f"{path}/{adapter_files.MANIFEST}", manifest)


def is_complete(url: str) -> bool:
    """Return whether every file of the version's manifest is there with its size.

    Raises CheckpointError.
    """
    with translated_errors(url):
        store, path = adapter_files.open_url(url)
        manifest = _read_manifest(store, path)
        if manifest is None:
            return False
        try:
            files = adapter_files.parse_manifest(manifest, url)
        except adapter_files.DamagedAdapter:
            return False
        found = {name.removeprefix(f"{path}/"): entry["size"] for name, entry in store.find(path, detail=True).items()}
        return all(found.get(name) == size for name, (size, _) in files.items())


def fetch(url: str, cache: Path, *, state: bool, max_cache_bytes: int) -> Path:
    """Return a verified local copy. Raises CheckpointError, also if the local disk is full."""
    with translated_errors(url):
        try:
            return adapter_files.fetch(url, cache, state=state, max_cache_bytes=max_cache_bytes)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{url} is no published version: its manifest or a file is missing") from error


def next_number(root: str) -> int:
    """Return one above the highest number under `root`, whether complete or not."""
    with translated_errors(root):
        store, path = adapter_files.open_url(root)
        return max(_numbers(store, path), default=0) + 1


def prune(root: str, folders: Set[int], states: Set[int]) -> tuple[int, ...]:
    """Remove the versions not in `folders`, and the learner's state from those not in `states`.

    Returns the numbers of the removed versions. Numbers above all of `folders` stay: one may be on its way.
    """
    gone: list[int] = []
    with translated_errors(root):
        store, path = adapter_files.open_url(root)
        for number in sorted(_numbers(store, path)):
            version = f"{path}/{number:04d}"
            if number > max(folders, default=0):
                continue
            if number not in folders:
                _remove(store, version)
                gone.append(number)
            elif number not in states:
                _remove_state(store, version)
    return tuple(gone)


def remove_incomplete(root: str) -> tuple[str, ...]:
    """Remove the versions without a manifest that nobody has written to for an hour; return their URLs."""
    removed: list[str] = []
    with translated_errors(root):
        store, path = adapter_files.open_url(root)
        for number in sorted(_numbers(store, path)):
            version = f"{path}/{number:04d}"
            if _read_manifest(store, version) is None and _idle_seconds(store, version) > _ABANDONED_SECONDS:
                store.rm(version, recursive=True)
                removed.append(f"{root}/{number:04d}")
    return tuple(removed)


def check(root: str) -> None:
    """Write, read and remove a small object. Raises CheckpointError if that fails."""
    with translated_errors(root):
        store, path = adapter_files.open_url(root)
        _make_folder(store, root, path)
        probe, content = f"{path}/.ratchet-{uuid.uuid4().hex}", b"probe"
        store.pipe_file(probe, content)
        if store.cat_file(probe) != content:
            raise AdapterStoreUnreachable(f"adapter store {root}: an object that was just written reads differently")
        store.rm(probe)


@contextlib.contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Raise our errors instead of those of fsspec and the libraries under it."""
    try:
        yield
    except CheckpointError:
        raise
    except adapter_files.DamagedAdapter as damaged:
        raise CheckpointDamaged(f"{damaged}; remove it or restore it, and go on from another version") from damaged
    except Exception as error:
        raise _translated(url, error) from error


def _translated(url: str, error: Exception) -> CheckpointError:
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    store, protocol = f"adapter store {url} (adapters.store)", url.partition("://")[0]
    if isinstance(error, ImportError):
        hint = install_hint(_EXTRAS[protocol]) if protocol in _EXTRAS else "install fsspec's package for it"
        return CheckpointError(f"{store}: the package for {protocol}:// is not installed: {hint}")
    if isinstance(error, ValueError) and "rotocol" in text:
        return CheckpointError(f"{store}: {protocol}:// is not known to fsspec; use a folder, s3:// or gs://")
    if "Credential" in kind or "credentials" in text.lower():
        return CheckpointError(
            f"{store}: no valid credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3://) or "
            f"GOOGLE_APPLICATION_CREDENTIALS (gs://), or give the machine a role ({text})"
        )
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or "storagefull" in text.lower() or "quota" in text.lower():
        return CheckpointError(f"{store} or the local disk is full: free space, or raise the quota ({text})")
    if isinstance(error, PermissionError):
        return CheckpointError(
            f"{store}: access denied: the credentials must allow listing, reading, writing and deleting "
            f"under it ({text})"
        )
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{store}: it does not exist: create the bucket, or correct adapters.store ({text})")
    return AdapterStoreUnreachable(
        f"{store} does not answer as it should: check the network and AWS_ENDPOINT_URL, if it is set ({kind}: {text})"
    )


def _make_folder(store: Any, url: str, path: str) -> None:
    """Make a folder where there are folders. Object storage has none, and would create a missing bucket."""
    if url.partition("://")[0] not in _EXTRAS:
        store.makedirs(path, exist_ok=True)


def _read_manifest(store: Any, version: str) -> bytes | None:
    try:
        content: bytes = store.cat_file(f"{version}/{adapter_files.MANIFEST}")
    except FileNotFoundError:
        return None
    return content


def _numbers(store: Any, path: str) -> list[int]:
    try:
        names = [str(name).rstrip("/").rpartition("/")[2] for name in store.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    return [int(name) for name in names if _NUMBERED.fullmatch(name)]


def _remove(store: Any, version: str) -> None:
    """Remove a version, the manifest first: what is left after a kill is incomplete."""
    with contextlib.suppress(FileNotFoundError):
        store.rm(f"{version}/{adapter_files.MANIFEST}")
    with contextlib.suppress(FileNotFoundError):
        store.rm(version, recursive=True)


def _remove_state(store: Any, version: str) -> None:
    manifest = _read_manifest(store, version)
    if manifest is None:
        return
    files = adapter_files.parse_manifest(manifest, version)
    kept = {name: entry for name, entry in files.items() if Path(name).parts[0] != adapter_files.STATE}
    if kept and len(kept) < len(files):
        store.pipe_file(f"{version}/{adapter_files.MANIFEST}", adapter_files.format_manifest(kept).encode())
    if len(kept) < len(files) or store.exists(f"{version}/{adapter_files.STATE}"):
        store.rm(f"{version}/{adapter_files.STATE}", recursive=True)


def _idle_seconds(store: Any, version: str) -> float:
    times = [store.modified(name) for name in store.find(version)]
    newest = max((moment.timestamp() for moment in times), default=0.0)
    return time.time() - newest
