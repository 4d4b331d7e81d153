"""Checkpoint folders: `models/<name>/checkpoints/NNNN/`, each complete or absent.

A checkpoint is written as `.NNNN.tmp-<pid>`, flushed to the disk, given a manifest of its files with sizes and SHA-256,
and renamed. Promises that a reader never sees a half-written checkpoint under its number, also after a power cut or on
a full disk, and that a number is never reused. Does not know the content of a checkpoint. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files as adapter_files
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError

MANIFEST = adapter_files.MANIFEST
STATE = adapter_files.STATE  # the part of a checkpoint that only training needs
ADAPTER_ONLY = f"{STATE}/adapter_only"  # of a copied adapter: training goes on from it with a new optimizer

_NUMBERED = re.compile(r"\d{4,}")
_ASIDE = re.compile(r"\.(?P<name>.+)\.tmp-(?P<pid>\d+)")
_RESTORE = "restore it from a backup, or roll back to another version"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def next_path(root: Path) -> Path:
    """Return the folder of the next checkpoint under `root`: one above the highest number ever started, from 0001."""
    numbers = [0]
    for entry in _entries(root):
        aside = _ASIDE.fullmatch(entry.name)
        name = aside["name"] if aside else entry.name
        if _NUMBERED.fullmatch(name):
            numbers.append(int(name))
    return root / f"{max(numbers) + 1:04d}"


def write_atomically(folder: Path, writer: Callable[[Path], None]) -> None:
    """Create `folder` with the files that `writer` writes into the empty folder it is passed, atomically.

    Raises CheckpointError if the folder exists, or the disk is full or fails, and whatever the
    writer raises. No partial checkpoint remains in any case.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists: checkpoints are never overwritten, save under a new number")
    aside = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        writer(aside)
        _write_manifest(aside)
        _flush(aside)
        aside.rename(folder)
        _flush_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(_why_unwritable(folder, error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def temporary_copy(folder: Path, suffix: str, writer: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a complete checkpoint beside `folder` with the files that `writer` writes; it is removed afterwards, or by
    `remove_incomplete` if this process dies. Raises CheckpointDamaged if `folder` is not complete, and as
    `write_atomically` does.
    """
    if not complete(folder):
        raise CheckpointDamaged(f"{folder} is missing or incomplete; {_RESTORE}")
    copy = folder.with_name(f".{folder.name}{suffix}.tmp-{os.getpid()}")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        write_atomically(copy, writer)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def verified_digest(folder: Path, name: str) -> str | None:
    """Return the SHA-256 of a file, which is also the manifest's; None if the manifest does not name the file.

    Raises CheckpointDamaged.
    """
    try:
        _, digest = adapter_files.parse_manifest((folder / MANIFEST).read_bytes(), str(folder)).get(name, (0, None))
        if digest is not None and adapter_files.digest_of(folder / name) != digest:
            raise CheckpointDamaged(f"{folder / name} has changed since it was written: {_RESTORE}")
    except (OSError, adapter_files.DamagedAdapter) as error:
        raise CheckpointDamaged(f"{folder} is not a complete checkpoint ({error}); {_RESTORE}") from error
    return digest


def check_writable(root: Path) -> None:
    """Raise CheckpointError if checkpoints cannot be written under `root`, before there is one to lose."""
    probe = root / f".probe-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        raise CheckpointError(
            f"no version can be written to {root}: {error.strerror or error}; let this user write there, free its "
            "disk, or set adapters.store to another folder"
        ) from error


def complete(folder: Path) -> bool:
    """Return whether every file of the folder's manifest exists with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def verify(folder: Path) -> None:
    """Raise CheckpointDamaged if a file of the folder's manifest is missing, or its SHA-256 is another one."""
    try:
        files = adapter_files.parse_manifest((folder / MANIFEST).read_bytes(), str(folder))
        changed = [name for name, (_, digest) in files.items() if adapter_files.digest_of(folder / name) != digest]
    except (OSError, adapter_files.DamagedAdapter) as error:
        raise CheckpointDamaged(f"{folder} is not a complete checkpoint ({error}); {_RESTORE}") from error
    if changed:
        raise CheckpointDamaged(
            f"{folder / changed[0]} has changed since it was written: its checksum is wrong; {_RESTORE}"
        )


def newest_complete(root: Path) -> Path | None:
    """Return the complete checkpoint with the highest number under `root`, or None."""
    numbered = [entry for entry in _entries(root) if _NUMBERED.fullmatch(entry.name)]
    newest_first = sorted(numbered, key=lambda entry: int(entry.name), reverse=True)
    return next(filter(complete, newest_first), None)


def remove_incomplete(root: Path) -> tuple[Path, ...]:
    """Remove the folders of interrupted writers under `root`; return them.

    A folder whose writer is alive stays. A damaged numbered folder stays too: it was complete when it was renamed, so
    something else damaged it; `newest_complete` skips it.
    """
    abandoned = [
        entry
        for entry in _entries(root)
        if (match := _ASIDE.fullmatch(entry.name)) and not _is_another_live_process(int(match["pid"]))
    ]
    for entry in abandoned:
        shutil.rmtree(entry)
    return tuple(sorted(abandoned))


def prune(root: Path, folders: Set[int], states: Set[int]) -> tuple[int, ...]:
    """Remove the numbered folders not in `folders`, and the learner's state from those not in `states`.

    Returns the numbers of the removed folders. Numbers above all of `folders` stay: a running round may be writing
    one. A folder is removed atomically; one that loses its state stays complete throughout. The next call, or
    `remove_incomplete`, finishes an interrupted removal.
    """
    gone: list[int] = []
    for entry in [entry for entry in _entries(root) if _NUMBERED.fullmatch(entry.name)]:
        number = int(entry.name)
        if number > max(folders, default=0):
            continue
        if number not in folders:
            aside = entry.with_name(f".{entry.name}.tmp-{os.getpid()}")
            entry.rename(aside)
            shutil.rmtree(aside)
            gone.append(number)
        elif number not in states and (entry / STATE).is_dir() and complete(entry):
            _write_manifest(entry, without=STATE)
            shutil.rmtree(entry / STATE)
    return tuple(sorted(gone))


def _entries(root: Path) -> Iterator[Path]:
    return (entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else iter(())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(folder: Path, without: str | None = None) -> None:
    """Write the manifest of a folder atomically, without the files of the subfolder `without`."""
    files = [path for path in _files(folder) if path.name != MANIFEST and path.relative_to(folder).parts[0] != without]
    entries = {
        path.relative_to(folder).as_posix(): (path.stat().st_size, adapter_files.digest_of(path)) for path in files
    }
    aside = folder / f".{MANIFEST}"
    aside.write_text(adapter_files.format_manifest(entries))
    aside.rename(folder / MANIFEST)


def _flush(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_another_live_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _why_unwritable(folder: Path, error: OSError) -> str:
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if error.errno in _FULL:
        return f"checkpoint {folder} was not written: {error.strerror}, {free} bytes free; free space on {existing}"
    return f"checkpoint {folder} was not written: {error.strerror or error} ({free} bytes free); check {existing}"
