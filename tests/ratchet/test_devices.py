"""Devices and hub variables: what vLLM's and the trainer's processes get, and what a busy GPU says."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ratchet.errors import CliError, SettingsError
from ratchet.settings.load_settings import load
from ratchet.supervisor import preflight_checks, services, vllm_command
from ratchet.trainer.settings.learner_settings import VARIABLE
from tests.harness.cli.project import Project

JUDGE = "tests.harness.tuner.judges:exact"
Environments = dict[str, dict[str, str]]


def environments(project: Project) -> Environments:
    """What each service of the project would be started with."""
    settings = load(project.folder / "ratchet.yaml", environ={})
    found = services.plan_services(settings, config=project.folder / "resolved.yaml").services
    return {service.name: dict(service.environment) for service in found}


def test_learner_and_vllm_are_pinned_each_to_its_own_devices(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    vllm = {**project.content["vllm"], "devices": [0, 1]}
    project.write(vllm=vllm, trainer={"judge": JUDGE}, learner={"devices": "2"})
    found = environments(project)
    pinned = {name: service[VARIABLE] for name, service in found.items()}
    assert pinned == {"vllm": "0,1", "proxy": "3", "learner": "2", "trainer": "3"}


@pytest.mark.slow
def test_without_settings_the_variable_holds_for_both(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write(trainer={"judge": JUDGE})
    monkeypatch.setenv(VARIABLE, "GPU-8f2c,1")
    assert {service[VARIABLE] for service in environments(project).values()} == {"GPU-8f2c,1"}
    monkeypatch.delenv(VARIABLE)
    assert not [service for service in environments(project).values() if VARIABLE in service]


@pytest.mark.slow
def test_the_hubs_variables_reach_vllm_and_the_trainer(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write(trainer={"judge": JUDGE}, base_model="acme/model")
    for name, value in (("HF_ENDPOINT", "http://mirror"), ("HF_HUB_OFFLINE", "1"), ("HF_HOME", "/cache")):
        monkeypatch.setenv(name, value)
    for name in ("vllm", "trainer"):
        service = environments(project)[name]
        assert (service["HF_ENDPOINT"], service["HF_HUB_OFFLINE"], service["HF_HOME"]) == (
            "http://mirror",
            "1",
            "/cache",
        )


@pytest.mark.slow
def test_vllm_sees_its_devices_and_its_command_is_logged(project: Project) -> None:
    project.write(vllm={**project.content["vllm"], "devices": 1})
    assert project.run("up", "--detach").returncode == 0
    first = (project.state / "logs" / "vllm.log").read_text().splitlines()[0]
    assert first.startswith("command: ")
    assert f"{VARIABLE}=1" in first
    vllm = int((project.state / "run" / "vllm.pid").read_text().split()[0])
    assert psutil.Process(vllm).environ()[VARIABLE] == "1"


@pytest.mark.parametrize("devices", ["first", "0,,1", "-1"])
def test_an_invalid_device_is_reported(project: Project, devices: str) -> None:
    project.write(trainer={"judge": JUDGE}, learner={"devices": devices})
    with pytest.raises(SettingsError, match="is not a device"):
        load(project.folder / "ratchet.yaml", environ={})


def test_hidden_gpus_are_none(project: Project) -> None:
    project.write(vllm={**project.content["vllm"], "devices": ""})
    settings = load(project.folder / "ratchet.yaml", environ={})
    assert not vllm_command.has_visible_gpu(settings)
    assert "--enforce-eager" in str(vllm_command.build_command(settings, 8235))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted nvidia-smi: GPU 0 is half full, GPU 1 is empty."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "  --query-gpu*) printf '0, GPU-aaa, 80000, 61000\\n1, GPU-bbb, 80000, 4\\n' ;;\n"
        "  --query-compute-apps*) printf 'GPU-aaa, 4711, python, 60990\\n' ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("devices", [None, "0", "GPU-aaa", "0,1"])
def test_a_busy_gpu_is_reported_with_the_pid_that_holds_it(devices: str | None) -> None:
    with pytest.raises(CliError, match=r"GPU 0 has 19000 of 80000 MiB free .* pid 4711 \(python, 60990 MiB\)"):
        preflight_checks.check_gpu_memory(devices, 0.5)


@pytest.mark.usefixtures("nvidia_smi")
def test_a_gpu_with_service_is_taken() -> None:
    preflight_checks.check_gpu_memory("1", 0.9)
    preflight_checks.check_gpu_memory("0", 0.2)
