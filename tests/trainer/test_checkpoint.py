"""Claims about checkpoint folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointExists, CheckpointUnwritable

DEAD_PID = 4_194_305  # above the kernel's largest process id


def write_a_file(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "weights.bin").write_bytes(b"12345")


def test_a_written_checkpoint_is_complete_and_the_newest(tmp_path: Path) -> None:
    for _ in range(2):
        checkpoint.write_atomically(checkpoint.next_path(tmp_path), write_a_file)
    assert sorted(os.listdir(tmp_path)) == ["0001", "0002"]
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "0002"


def test_half_written_checkpoints_are_ignored_and_swept(tmp_path: Path) -> None:
    checkpoint.write_atomically(tmp_path / "0001", write_a_file)
    write_a_file_in(tmp_path / f".0002.tmp-{DEAD_PID}")
    write_a_file_in(tmp_path / "0003")
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "0001"
    assert checkpoint.next_path(tmp_path) == tmp_path / "0004"
    assert checkpoint.remove_incomplete(tmp_path) == (tmp_path / f".0002.tmp-{DEAD_PID}",)
    assert sorted(os.listdir(tmp_path)) == ["0001", "0003"]


def test_a_checkpoint_that_lost_bytes_is_passed_over(tmp_path: Path) -> None:
    for name in ("0001", "0002", "0003"):
        checkpoint.write_atomically(tmp_path / name, write_a_file)
    (tmp_path / "0003" / "inner" / "weights.bin").write_bytes(b"123")
    (tmp_path / "0002" / checkpoint.MANIFEST).write_text("{")
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "0001"


def test_the_folder_of_a_living_writer_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / f".0001.tmp-{os.getppid()}").mkdir()
    assert checkpoint.remove_incomplete(tmp_path) == ()


def test_a_full_disk_leaves_nothing_and_names_path_and_free_bytes(tmp_path: Path) -> None:
    def write_to_a_full_disk(folder: Path) -> None:
        write_a_file(folder)
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"1")

    with pytest.raises(CheckpointUnwritable, match=r"0001 was not written: No space left on device, \d+ bytes free"):
        checkpoint.write_atomically(tmp_path / "0001", write_to_a_full_disk)
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from ratchet.trainer.adapters import checkpoint\n"
        "def writer(folder): (folder / 'x').write_bytes(b'1'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.write_atomically(Path(sys.argv[1]) / '0001', writer)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(os.listdir(tmp_path)) == 1
    assert checkpoint.newest_complete(tmp_path) is None
    assert len(checkpoint.remove_incomplete(tmp_path)) == 1


def test_a_taken_folder_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint.write_atomically(tmp_path / "0001", write_a_file)
    with pytest.raises(CheckpointExists, match="never overwritten"):
        checkpoint.write_atomically(tmp_path / "0001", lambda folder: None)
    assert checkpoint.complete(tmp_path / "0001")


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path / "absent") is None
    assert checkpoint.next_path(tmp_path / "absent") == tmp_path / "absent" / "0001"
    assert checkpoint.remove_incomplete(tmp_path / "absent") == ()


def write_a_file_in(folder: Path) -> None:
    folder.mkdir()
    write_a_file(folder)
