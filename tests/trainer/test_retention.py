"""What stays on the disk, and that a folder is whole all the time while others go."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ratchet.store.records import PastScore, Policy
from ratchet.store.states import PolicyState
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.release.release_controller import best_first, retained


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
    kept = retained(policies, pinned={2}, best=[5, 4], newest=2, states=1)
    assert kept.folders == {9, 8, 3, 2, 5}
    assert kept.states == {9, 5, 3}  # a roll back goes on from the live one


def test_a_folder_that_a_kept_version_shares_stays_with_its_state() -> None:
    policies = [policy(version) for version in range(6)]
    policies[5] = msgspec.structs.replace(policy(5, PolicyState.LIVE), adapter="/c/2", prompt_id="prm_1")
    kept = retained(policies, pinned=(), best=[], newest=1, states=1)
    assert (kept.folders, kept.states) == ({5, 2}, {5, 2})


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
