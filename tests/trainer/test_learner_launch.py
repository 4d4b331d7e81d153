"""How the processes of a learner are started: by torchrun, on one machine or several, and only if they are alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ratchet.settings.load_settings import load
from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.launch import torchrun_command
from ratchet.trainer.learner_service.process import LearnerProcessIdentity, difference
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings
from tests.harness.proxy.servers import ROOT
from tests.harness.trainer.two_machines import Machine, two_machines

PAGE = (ROOT / "docs" / "training.md").read_text()
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


def _recipe(name: str) -> str:
    """The code of docs/training.md under a heading."""
    found = re.search(rf"^### {name}\n+```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def _process(environ: Mapping[str, str]) -> LearnerProcessSettings:
    return load(environ={k: v for k, v in environ.items() if k.startswith("RATCHET_")}).learner


def test_the_recipe_for_slurm_starts_the_learner_once_on_each_machine(tmp_path: Path) -> None:
    programs = {
        "scontrol": "printf 'gpu1\\ngpu2\\n'",
        "srun": 'shift; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
        "ratchet": "env; echo .",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    script = _recipe("SLURM")
    assert "--nodes=2 --ntasks-per-node=1 " in script
    done = subprocess.run(["bash", "-euc", script], env=environ, capture_output=True, text=True, check=True)
    seen = [dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)) for text in done.stdout.split("\n.\n")[:-1]]
    assert len(seen) == 2
    for number, variables in enumerate(seen):
        process = _process(variables)
        assert process.host == "0.0.0.0"
        found = command(process, **variables)
        assert f"--nnodes 2 --node-rank {number} --master-addr gpu1 " in found
        assert "--nproc-per-node 8 " in found


def test_the_recipe_for_ray_names_the_settings_of_a_group() -> None:
    recipe = _recipe("Ray")
    compile(recipe, "recipe", "exec")
    given = {"RATCHET_LEARNER__LEADER": "10.0.0.1", "RATCHET_LEARNER__MACHINE_RANK": "1"}
    assert given.keys() | {"RATCHET_LEARNER_TOKEN"} == {*re.findall(r'"(RATCHET_\w+)": [^"]', recipe)}
    process = _process({**given, **dict(re.findall(r'"(RATCHET_\w+)": "([^"]*)"', recipe))})
    assert (process.machines, process.num_processes, process.host) == (2, 8, "0.0.0.0")
    assert "--node-rank 1 --master-addr 10.0.0.1 " in command(process)


def test_a_process_of_another_version_or_model_is_named_with_the_remedy() -> None:
    first = LearnerProcessIdentity("gpu1", "1.0", "base", {"weights": "a", "config": "c"})
    assert (
        difference(first, LearnerProcessIdentity("gpu2", "1.0", "elsewhere/base", {"weights": "a", "config": "c"}))
        is None
    )
    other = difference(first, LearnerProcessIdentity("gpu2", "1.1", "base", {}))
    assert re.search(r"1\.1 .* gpu2, and 1\.0 on gpu1", str(other))
    assert "its weights differ" in str(
        difference(first, LearnerProcessIdentity("gpu2", "1.0", "base", {"weights": "b", "config": "c"}))
    )


def start(machine: Machine, number: int, leader: Machine, *arguments: str) -> subprocess.Popen[str]:
    process = LearnerProcessSettings(machines=2, machine_rank=number, leader=leader.address)
    program = (sys.executable, "-m", "tests.harness.trainer.two_machines", *arguments)
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
        ("b", [f"{one} refused: base_model " for one in ("gpu0", "gpu1")]),
    ],
)
def test_two_machines_find_each_other_and_end_together_if_they_differ(weights: str, messages: list[str]) -> None:
    with two_machines() as (first, second):
        runs = [start(first, 0, first, "1.0", "a"), start(second, 1, first, "1.0", weights)]
        outputs = [run.communicate(timeout=300)[0] for run in runs]
    for message, output in zip(messages, outputs, strict=True):
        assert message in output
    assert [bool(run.returncode) for run in runs] == [weights != "a"] * 2
