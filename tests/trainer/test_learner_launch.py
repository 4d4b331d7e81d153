"""How the processes of a learner are started: by torchrun, on one machine or several, and only if they are alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner_service.group_check import LearnerProcessIdentity, difference
from ratchet.trainer.learner_service.launch import torchrun_command
from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings
from tests.harness.proxy.servers import ROOT
from tests.harness.trainer.two_machines import Machine, two_machines

PROGRAM = ("python", "-m", "ratchet", "learner")
TWO = LearnerProcessSettings(machines=2, leader="gpu1", num_processes=4)


def command(process: LearnerProcessSettings, **environ: str) -> str:
    return " ".join(torchrun_command(process, environ, PROGRAM) or ())


def test_one_process_needs_no_launcher_and_a_process_of_torchrun_starts_none() -> None:
    assert torchrun_command(LearnerProcessSettings(), {}, PROGRAM) is None
    assert torchrun_command(TWO, {"TORCHELASTIC_RUN_ID": "x", "RANK": "3"}, PROGRAM) is None


def test_several_processes_of_one_machine_meet_on_loopback() -> None:
    found = command(LearnerProcessSettings(num_processes=4))
    assert "--standalone --local-addr 127.0.0.1 " in found
    assert "--nproc-per-node 4 --no-python python -m ratchet learner" in found


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "JOB_COMPLETION_INDEX", "RANK"])
def test_the_number_of_a_machine_comes_from_its_scheduler(variable: str) -> None:
    found = command(TWO, **{variable: "1"})
    assert "--nnodes 2 --node-rank 1 --master-addr gpu1 --master-port 29500 " in found
    with pytest.raises(SettingError, match=f"{variable} is 2, but learner.machines is 2"):
        command(TWO, **{variable: "2"})


def test_settings_are_stronger_than_the_scheduler_and_what_is_missing_is_named() -> None:
    own = LearnerProcessSettings(machines=2, machine_rank=0, leader_port=1234)
    found = command(own, SLURM_PROCID="1", MASTER_ADDR="10.0.0.1")
    assert "--node-rank 0 --master-addr 10.0.0.1 --master-port 1234" in found
    with pytest.raises(SettingError, match=r"set learner\.machine_rank .* or one of SLURM_PROCID"):
        command(TWO)
    with pytest.raises(SettingError, match=r"set learner\.leader .* or MASTER_ADDR"):
        command(own)


def test_a_process_of_another_version_or_model_is_named_with_the_remedy() -> None:
    first = LearnerProcessIdentity("gpu1", "1.0", "base", {"weights": "a", "config": "c"})
    assert (
        difference(first, LearnerProcessIdentity("gpu2", "1.0", "elsewhere/base", {"weights": "a", "config": "c"}))
        is None
    )
    assert "Ratchet 1.1 is installed on gpu2, and 1.0 on gpu1" in str(
        difference(first, LearnerProcessIdentity("gpu2", "1.1", "base", {}))
    )
    assert "its weights differ" in str(
        difference(first, LearnerProcessIdentity("gpu2", "1.0", "base", {"weights": "b", "config": "c"}))
    )


def start(machine: Machine, number: int, leader: Machine, *arguments: str) -> subprocess.Popen[str]:
    process = LearnerProcessSettings(machines=2, machine_rank=number, leader=leader.address)
    program = (sys.executable, "-m", "tests.harness.trainer.learner_member", *arguments)
    torchrun = torchrun_command(process, {}, program)
    assert torchrun is not None
    environment = {**os.environ, **machine.environment, "PYTHONPATH": str(ROOT), "MACHINE": f"gpu{number}"}
    return subprocess.Popen(
        [*machine.prefix, *torchrun], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "messages"),
    [
        ("a", ["gpu0 is rank 0 of 2", "gpu1 is rank 1 of 2"]),
        ("b", [f"{one} refused: base_model base on gpu1 is not base on gpu0" for one in ("gpu0", "gpu1")]),
    ],
)
def test_two_machines_find_each_other_and_end_together_if_they_differ(weights: str, messages: list[str]) -> None:
    with two_machines() as (first, second):
        runs = [start(first, 0, first, "1.0", "a"), start(second, 1, first, "1.0", weights)]
        outputs = [run.communicate(timeout=300)[0] for run in runs]
    for message, output in zip(messages, outputs, strict=True):
        assert message in output
    assert [bool(run.returncode) for run in runs] == [weights != "a"] * 2
