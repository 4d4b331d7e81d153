"""Claims about GPU memory before anything is loaded, on machines that a fake nvidia-smi describes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.doctor import check_memory
from ratchet.checks.learner_check import why_no_learner
from ratchet.errors import CliError
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import preflight_checks, services, vllm_command
from tests.harness.cli import fake_nvidia_smi
from tests.harness.cli.project import Project

JUDGE = "tests.harness.tuner.judges:exact"
# MiB that nvidia-smi prints for an RTX 4090, an L40S and an H100.
GPU_24, GPU_48, GPU_80 = 24564, 46068, 81559
HALF_B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
SEVEN_B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip
EIGHT_B_LONG = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip

Machine = Callable[..., None]
Plan = Callable[..., services.LaunchPlan]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Describe the machine's GPUs: `machine(24564, gpus=2)`."""

    def describe(total_mib: int, **more: Any) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        fake_nvidia_smi.install(folder, monkeypatch, total_mib=total_mib, **more)

    yield describe
    vllm_command.has_gpu.cache_clear()


@pytest.fixture
def plan(project: Project, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return what `up` would start for a model: `plan(SEVEN_B, learner={...})`."""
    # The judge is created in a process of its own; that is another test's.
    monkeypatch.setattr("ratchet.supervisor.preflight_checks.check_judges", lambda *_: None)

    def of(model: dict[str, Any], judged: bool = True, **settings: Any) -> services.LaunchPlan:
        (project.folder / "model" / "config.json").write_text(json.dumps(model))
        vllm = {**project.content["vllm"], **settings.pop("vllm", {})}
        project.write(vllm=vllm, trainer={"judge": JUDGE} if judged else {}, **settings)
        found = load(project.folder / "ratchet.yaml", environ={})
        return services.plan_services(found, config=project.folder / "resolved.yaml")

    return of


def share(plan: services.LaunchPlan) -> float:
    arguments = plan.vllm.arguments
    return float(arguments[arguments.index("--gpu-memory-utilization") + 1])


@pytest.mark.parametrize(
    ("total", "model", "expected"),
    [(GPU_24, HALF_B, (0.2, 0.8)), (GPU_48, SEVEN_B, (0.4, 0.6)), (GPU_80, SEVEN_B, (0.4, 0.6))],
)
def test_up_splits_one_gpu_without_settings(
    machine: Machine, plan: Plan, total: int, model: dict[str, Any], expected: tuple[float, float]
) -> None:
    machine(total)
    found = plan(model)
    low, high = expected
    assert low < share(found) < high
    (note,) = [note for note in found.notes if note.startswith("GPU memory")]
    assert f"vLLM gets {share(found):.0%}, the learner needs" in note
    learner = float(note.rpartition("needs ")[2].removesuffix(" GiB"))
    assert share(found) * total / 1024 + learner < total / 1024


def test_a_learner_beside_vllm_on_one_gpu_is_limited_to_what_vllm_leaves(machine: Machine, plan: Plan) -> None:
    def learners_share(found: services.LaunchPlan) -> float | None:
        return found.settings.learner.gpu_memory_utilization

    machine(GPU_80)
    found = plan(SEVEN_B)
    assert learners_share(found) == pytest.approx(0.92 - share(found))
    machine(GPU_80, gpus=2)
    assert learners_share(plan(SEVEN_B)) is None
    machine(GPU_80)
    assert learners_share(plan({"model_type": "unheard_of"}, vllm={"gpu_memory_utilization": 0.3})) == 0.7
    assert learners_share(plan(SEVEN_B, learner={"gpu_memory_utilization": 0.25})) == 0.25


def test_a_gpu_of_its_own_leaves_vllm_its_default(machine: Machine, plan: Plan) -> None:
    machine(GPU_48, gpus=2)
    found = plan(SEVEN_B, vllm={"devices": "0"}, learner={"devices": "1"})
    assert share(found) == 0.92
    assert share(plan(SEVEN_B, judged=False)) == 0.92


def test_a_learner_on_vllms_gpu_starts_after_it_and_the_trainer_after_both(machine: Machine, plan: Plan) -> None:
    def order(found: services.LaunchPlan) -> dict[str, tuple[tuple[str, ...], str]]:
        return {one.name: (one.starts_after, one.stops_for) for one in found.services}

    machine(GPU_48)
    at_once, last = ((), ""), (("vllm", "learner"), "")
    assert order(plan(SEVEN_B)) == {
        "vllm": at_once, "proxy": at_once, "learner": (("vllm",), "vllm"), "trainer": last,
    }  # fmt: skip
    assert order(plan({"model_type": "mamba"}))["learner"] == (("vllm",), "vllm")  # without a plan, too
    machine(GPU_48, gpus=2)
    assert order(plan(SEVEN_B)) == {"vllm": at_once, "proxy": at_once, "learner": at_once, "trainer": last}
    without = order(plan(SEVEN_B, vllm={"devices": ""}))
    assert (without["learner"], without["trainer"]) == (at_once, last)


@pytest.mark.parametrize(
    ("gpus", "vllm", "learner", "expected"),
    [
        (2, {}, {}, ("0", "1")),
        (4, {"tensor_parallel_size": 2}, {"num_processes": 2}, ("0,1", "2,3")),
        (4, {}, {}, ("0", "1")),
        (3, {"devices": "1"}, {}, ("1", "0")),
        (3, {}, {"devices": "0"}, ("1", "0")),
        (1, {}, {}, (None, None)),
        (2, {"tensor_parallel_size": 2}, {}, (None, None)),  # too few for both
        (2, {"devices": "0"}, {"devices": "0"}, ("0", "0")),
        (2, {"extra_args": ["-pp=2"]}, {}, (None, None)),  # vLLM's own arguments say how many it uses
        (2, {}, {"url": "http://gpu9:8002"}, (None, None)),  # the learner has GPUs elsewhere
    ],
)
def test_vllm_and_learner_get_gpus_of_their_own_where_there_are_enough(
    machine: Machine,
    plan: Plan,
    gpus: int,
    vllm: dict[str, Any],
    learner: dict[str, Any],
    expected: tuple[str | None, str | None],
) -> None:
    machine(GPU_48, gpus=gpus)
    found = plan(HALF_B, vllm=vllm, learner=learner)
    assert (found.settings.vllm.devices, found.settings.learner.devices) == expected
    environments = {service.name: service.environment.get("CUDA_VISIBLE_DEVICES") for service in found.services}
    assert environments["vllm"] == expected[0]
    assert environments.get("learner") == expected[1]
    apart = expected[0] is not None and expected[0] != expected[1]
    assert (share(found) == 0.92) == (apart or "url" in learner)


def test_up_says_which_gpus_it_gave_to_whom_and_which_are_unused(machine: Machine, plan: Plan) -> None:
    machine(GPU_48, gpus=4)
    (note,) = [note for note in plan(HALF_B).notes if note.startswith("GPUs")]
    assert note == (
        "GPUs: vLLM gets 0, the learner 1; nothing uses 2, 3: learner.num_processes: 3, or vllm.tensor_parallel_size, "
        "would"
    )


def test_a_sharded_learner_over_machines_is_planned_with_all_of_their_gpus(machine: Machine, plan: Plan) -> None:
    machine(12282, gpus=4)
    vllm = {"tensor_parallel_size": 2, "max_model_len": 4096}
    learner = {"sharding": "fsdp2", "num_processes": 2, "token_budget": 2048}
    with pytest.raises(CliError, match="does not fit on GPUs of 12 GiB"):
        plan(SEVEN_B, vllm=vllm, learner=learner)
    plan(SEVEN_B, vllm=vllm, learner=learner | {"machines": 2})


def test_a_share_that_the_user_set_is_kept_or_refused(machine: Machine, plan: Plan) -> None:
    machine(GPU_80)
    assert share(plan(SEVEN_B, vllm={"gpu_memory_utilization": 0.4})) == 0.4
    for own, says in ((0.9, "gives vLLM 71.7"), (0.1, "gives vLLM 8.0")):
        with pytest.raises(CliError, match=rf"{says}.*; leave out vllm\.gpu_memory_utilization"):
            plan(SEVEN_B, vllm={"gpu_memory_utilization": own})


def test_what_cannot_fit_is_refused_with_figures_and_a_setting_that_fits(machine: Machine, plan: Plan) -> None:
    machine(GPU_24)
    with pytest.raises(CliError, match=r"does not fit on GPUs of 24 GiB, which they share: vLLM needs 1\d\.\d GiB"):
        plan(SEVEN_B)
    with pytest.raises(CliError, match=r"take a smaller model or larger GPUs \(`ratchet plan`\)"):
        plan(SEVEN_B)
    machine(GPU_48)
    unfit = {"gradient_checkpointing": False}
    with pytest.raises(CliError, match=r"set learner\.gradient_checkpointing: true"):
        plan(SEVEN_B, learner=unfit)
    plan(SEVEN_B, learner={"gradient_checkpointing": True})
    with pytest.raises(CliError, match=r"for 65536 tokens; set learner\.token_budget: 4096"):
        plan(SEVEN_B, learner={"token_budget": 65536})
    plan(SEVEN_B, learner={"token_budget": 4096})


def test_a_context_that_does_not_fit_is_shortened_unless_it_was_set(machine: Machine, plan: Plan) -> None:
    machine(GPU_48)
    found = plan(EIGHT_B_LONG)
    (note,) = [note for note in found.notes if note.startswith("vllm.max_model_len")]
    length = int(note.split()[1].rstrip(","))
    assert 4096 <= length < 131072
    assert ("--max-model-len", str(length)) in zip(found.vllm.arguments, found.vllm.arguments[1:], strict=False)
    with pytest.raises(CliError, match=r"131072 tokens 16\.0.*leave out vllm\.max_model_len, or lower it"):
        plan(EIGHT_B_LONG, vllm={"max_model_len": 131072})


def test_a_model_without_a_formula_starts_with_a_note(machine: Machine, plan: Plan) -> None:
    machine(GPU_24)
    found = plan({"model_type": "mamba"})
    assert share(found) == 0.5
    assert any("memory is not planned: no memory formula for model_type 'mamba'" in note for note in found.notes)


def test_without_a_gpu_nothing_is_planned(plan: Plan) -> None:
    found = plan(SEVEN_B, vllm={"devices": ""})
    assert "--gpu-memory-utilization" not in found.vllm.arguments
    assert not [note for note in found.notes if "memory" in note]


def test_tensor_parallelism_splits_the_weights(machine: Machine, plan: Plan) -> None:
    machine(12282, gpus=4)
    learner = {"devices": "3", "quantization": "nf4", "token_budget": 2048}
    with pytest.raises(CliError, match=r"GPUs of 12 GiB: vLLM needs 1\d\.\d GiB a GPU"):
        plan(SEVEN_B, vllm={"devices": "0,1"}, learner=learner)
    found = plan(SEVEN_B, vllm={"devices": "0,1", "tensor_parallel_size": 2}, learner=learner)
    arguments = found.vllm.arguments
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "2"


def test_planned_settings_are_what_the_services_read(machine: Machine, plan: Plan) -> None:
    machine(GPU_80)
    found = plan(SEVEN_B)
    assert found.settings.vllm.gpu_memory_utilization == share(found)
    assert preflight_checks.plan_memory(found.settings).settings == found.settings


def test_the_doctor_reports_memory_before_it_loads_anything(machine: Machine, project: Project) -> None:
    def settings(model: dict[str, Any]) -> Settings:
        (project.folder / "model" / "config.json").write_text(json.dumps(model))
        project.write(trainer={"judge": JUDGE})
        return load(project.folder / "ratchet.yaml", environ={})

    machine(GPU_24)
    fits = check_memory(settings(HALF_B))
    assert fits is not None
    assert (fits.name, fits.passed) == ("memory", True)
    assert "the learner needs" in fits.seen
    refused = check_memory(settings(SEVEN_B))
    assert refused is not None
    assert not refused.passed
    assert "take a smaller model" in (refused.remedy or "")
    assert why_no_learner(settings(HALF_B)) is None
    machine(GPU_24, used_mib=GPU_24 - 1024)
    assert re.fullmatch(
        r"not checked: the learner's GPU has 1\.0 GiB free, and a learner needs \d\.\d GiB",
        str(why_no_learner(settings(HALF_B))),
    )


def test_the_doctor_says_nothing_of_memory_without_a_gpu(project: Project) -> None:
    project.write(vllm={**project.content["vllm"], "devices": ""})
    settings = load(project.folder / "ratchet.yaml", environ={})
    assert check_memory(settings) is None
    assert why_no_learner(settings) is None
