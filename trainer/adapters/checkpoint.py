"""Checkpoint folders: `models/<name>/checkpoints/NNNN/`, each whole or absent.

A checkpoint is written aside as `.NNNN.tmp-<pid>`, flushed to the disk, given a manifest of its files and sizes, and
renamed. Promises that a reader never sees a half-written checkpoint under its number, also after a power cut or on a
full disk, and that a number is never given twice. Does not know what is in a checkpoint, and imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from ratchet.trainer.errors import CheckpointExists, CheckpointUnwritable

MANIFEST = "manifest.json"
STATE = "learner"  # the part of a checkpoint that only training goes on from

_NUMBERED = re.compile(r"\d{4,}")
_ASIDE = re.compile(r"\.(?P<name>.+)\.tmp-(?P<pid>\d+)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def next_path(root: Path) -> Path:
    """The folder of the next checkpoint under `root`: one above the highest number ever begun there, from 0001."""
    begun = [0]
    for entry in _entries(root):
        aside = _ASIDE.fullmatch(entry.name)
        name = aside["name"] if aside else entry.name
        if _NUMBERED.fullmatch(name):
            begun.append(int(name))
    return root / f"{max(begun) + 1:04d}"


def write_atomically(folder: Path, writer: Callable[[Path], None]) -> None:
    """Make `folder` with what `writer` puts into the empty folder that it is given; all of it or nothing.

    Raises CheckpointExists when the folder is taken, CheckpointUnwritable when the disk is full or refuses. Whatever
    the writer itself raises passes through. In every case nothing half-written stays behind.
    """
    if folder.exists():
        raise CheckpointExists(f"{folder} is taken: checkpoints are never overwritten, save under a new number")
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
        raise CheckpointUnwritable(_why_unwritable(folder, error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def complete(folder: Path) -> bool:
    """Whether every file that the folder's manifest names is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest_complete(root: Path) -> Path | None:
    """The complete checkpoint with the highest number under `root`, or None."""
    numbered = [entry for entry in _entries(root) if _NUMBERED.fullmatch(entry.name)]
    newest_first = sorted(numbered, key=lambda entry: int(entry.name), reverse=True)
    return next(filter(complete, newest_first), None)


def sweep(root: Path) -> tuple[Path, ...]:
    """Remove what interrupted writers left under `root`; returns the removed folders.

    A folder whose writer still lives is left alone. A damaged folder under a number is left too: it was renamed whole,
    so something outside damaged it, and it may be evidence; `newest_complete` passes it over.
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

    Returns the numbers of the removed folders. Numbers above all of `folders` are left: a round that writes one may be
    under way. A folder vanishes from under its number in one step; one without its state is complete all the time.
    What is interrupted is done by the next call, or by `sweep`.
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
    """Write the manifest of a folder, in one step; `without` leaves out a folder inside."""
    files = [path for path in _files(folder) if path.name != MANIFEST and path.relative_to(folder).parts[0] != without]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    aside = folder / f".{MANIFEST}"
    aside.write_text(json.dumps({"bytes": sizes}, indent=2) + "\n")
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
