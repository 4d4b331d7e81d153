"""Checkpoint folders: whole all the time, and what stays on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ratchet.store.records import PastScore, Policy
from ratchet.store.states import PolicyState
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.controller.learner_work import best_first, retained
from ratchet.trainer.errors import CheckpointError

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

    with pytest.raises(CheckpointError, match=r"0001 was not written: No space left on device, \d+ bytes free"):
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
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpoint.write_atomically(tmp_path / "0001", lambda folder: None)
    assert checkpoint.complete(tmp_path / "0001")


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path / "absent") is None
    assert checkpoint.next_path(tmp_path / "absent") == tmp_path / "absent" / "0001"
    assert checkpoint.remove_incomplete(tmp_path / "absent") == ()


def write_a_file_in(folder: Path) -> None:
    folder.mkdir()
    write_a_file(folder)


def policy(version: int, state: PolicyState = PolicyState.RETIRED) -> Policy:
    return Policy(
        alias="agent",
        version=version,
        state=state,
        served_name=f"agent@{version}",
        adapter=f"/c/{version}" if version else None,
        created_at=0.0,
        round_id=None,
    )


def scores(version: int, score: float, count: int) -> list[PastScore]:
    return [PastScore(f"t{version}-{n}", "family", "cohort", version, score, float(n)) for n in range(count)]


def made(root: Path, number: int) -> Path:
    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"adapter")
        (folder / checkpoint.STATE).mkdir()
        (folder / checkpoint.STATE / "optimizer.pt").write_bytes(b"state")

    folder = root / f"{number:04d}"
    checkpoint.write_atomically(folder, write)
    return folder


def test_what_serves_what_is_pinned_the_newest_and_the_best_stay() -> None:
    policies = [policy(version) for version in range(10)]
    policies[3] = policy(3, PolicyState.LIVE)
    folders, states = retained(policies, pinned={2}, best=[5, 4], newest=2, states=1)
    assert folders == {9, 8, 3, 2, 5}
    assert states == {9, 5, 3}  # a roll back goes on from the live one


def test_a_folder_that_a_kept_version_shares_stays_with_its_state() -> None:
    policies = [policy(version) for version in range(6)]
    policies[5] = msgspec.structs.replace(policy(5, PolicyState.LIVE), adapter="/c/2", prompt_id="prm_1")
    folders, states = retained(policies, pinned=(), best=[], newest=1, states=1)
    assert (folders, states) == ({5, 2}, {5, 2})


def test_the_best_version_is_known_by_enough_scores_and_is_never_the_base_model() -> None:
    past = scores(1, 0.5, 20) + scores(2, 0.7, 20) + scores(3, 1.0, 3) + scores(0, 1.0, 20)
    assert best_first(past) == [2, 1]


def test_pruned_versions_are_gone_and_the_others_stay_whole(tmp_path: Path) -> None:
    folders = {number: made(tmp_path, number) for number in (1, 2, 3, 4)}
    assert checkpoint.prune(tmp_path, {2, 3}, {3}) == (1,)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0002", "0003", "0004"]  # 4 is newer than all
    assert all(checkpoint.complete(folders[number]) for number in (2, 3, 4))
    assert not (folders[2] / checkpoint.STATE).exists()
    assert (folders[3] / checkpoint.STATE / "optimizer.pt").read_bytes() == b"state"
    assert checkpoint.prune(tmp_path, {2, 3}, {3}) == ()


def test_a_damaged_folder_is_not_declared_whole_by_pruning_it(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    (folder / "adapter_model.safetensors").unlink()
    checkpoint.prune(tmp_path, {1}, set())
    assert not checkpoint.complete(folder)
