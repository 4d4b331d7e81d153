"""A process of a group that is killed in any verb ends the group within seconds; the next one goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.proxy.servers import ROOT
from tests.harness.trainer.killed_groups import CASES, HANGING, SHARDINGS, KillCase

pytestmark = pytest.mark.slow

MOST_SECONDS = 10.0  # from the kill to the end of all processes


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every group lost a process, and the next groups went on."""
    found = tmp_path_factory.mktemp("killed")
    program = [sys.executable, "-m", "tests.harness.trainer.killed_groups", str(tiny_model), str(found)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, cwd=ROOT, env=environment, timeout=400, check=True)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kill_ends_every_process_of_the_group_within_ten_seconds(case: KillCase, folder: Path) -> None:
    other = "1" if case.role == "leader" else "0"
    log = (folder / f"{case}-{other}.log").read_text()
    assert log.endswith("ended with 1\n"), log[-3000:]
    killed = float((folder / str(case) / "kill").read_text())
    ends = json.loads((folder / "ends.json").read_text())
    assert ends[f"{case}-{other}"] - killed < MOST_SECONDS


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_next_group_goes_on_from_each_commit(sharding: str, folder: Path) -> None:
    log = (folder / f"next-{sharding}-0.log").read_text()
    assert log.endswith("ended with 0\n"), log[-3000:]
    found = json.loads((folder / f"next-{sharding}.json").read_text())
    for case in found.values():
        assert (case["commits"], case["step"], case["same"], case["next"]) == (["0001"], 1, True, 2)
    assert len({case["loss"] for case in found.values()}) == 1  # each goes on as the others do
    assert len(found) == len(CASES) / 2


def test_a_follower_that_gets_sigterm_does_not_wait_for_a_leader_that_hangs(folder: Path) -> None:
    log = (folder / f"{HANGING}-1.log").read_text()
    assert "rank zero did not stop it within 7 s" in log, log[-3000:]
    ends = json.loads((folder / "ends.json").read_text())
    assert ends[f"{HANGING}-1"] - float((folder / str(HANGING) / "stopped").read_text()) < MOST_SECONDS
