"""The vLLM command, and the errors that are reported before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import CliError, SettingsError
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import vllm_command
from tests.harness.cli.project import Project


def settings(base_model: str, **vllm: object) -> Settings:
    return load(
        options={("base_model",): ("", base_model), **{("vllm", k): ("", v) for k, v in vllm.items()}}, environ={}
    )


def test_strict_tools_are_off_by_default_and_the_proxy_knows_the_level(project: Project) -> None:
    model = str(project.folder / "model")
    strict = {"enforce_strict_tool_calling": True}
    by_argument = strict | {"extra_args": ["--tool-strict-level", "function"]}
    for own, variable, level in ((dict[str, Any](), "0", "off"), (strict, "1", "auto"), (by_argument, "1", "function")):
        chosen = settings(model, **own)
        environment = vllm_command.build_command(chosen, 8235, gpu=False).environment
        assert environment["VLLM_ENFORCE_STRICT_TOOL_CALLING"] == variable
        assert chosen.proxy.tool_strict_level == level
    elsewhere = settings(model).proxy_before(("http://127.0.0.1:1",))
    assert elsewhere.tool_strict_level == "auto", "a server that is not ours is taken to have vLLM's own default"
    with pytest.raises(SettingsError, match=r"use vllm\.enforce_strict_tool_calling"):
        settings(model, env={"VLLM_ENFORCE_STRICT_TOOL_CALLING": "1"})


def test_the_command_allows_adapters_at_run_time_and_keeps_the_models_sampling_out(project: Project) -> None:
    (project.folder / "model" / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    plan = vllm_command.build_command(settings(str(project.folder / "model"), max_loras=3), 8235, gpu=False)
    command = str(plan)
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")
    for part in (
        "--served-model-name policy@0",
        "--port 8235",
        "--enable-lora --max-lora-rank 16 --max-loras 3 --max-cpu-loras 8",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-auto-tool-choice --tool-call-parser hermes",
        "--max-num-seqs 256",
        "--enforce-eager --block-size 32",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "HF_HUB_OFFLINE=1",
    ):
        assert part in command


def test_without_a_gpu_both_sides_use_one_number_format_and_a_line_says_which(project: Project) -> None:
    def planned(gpu: bool, **more: Any) -> tuple[str, tuple[str, ...]]:
        (project.folder / "model" / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
        learner = more.pop("learner", {})
        own = settings(str(project.folder / "model"), **more).changed(learner=learner)
        plan = vllm_command.build_command(own, 8235, gpu=gpu)
        return plan.arguments[plan.arguments.index("--dtype") + 1], plan.notes

    line = "no GPU: vLLM serves {}, in which the learner computes (vllm.dtype)"
    assert planned(gpu=False) == ("float32", (line.format("float32"),))
    assert planned(gpu=False, learner={"dtype": "bfloat16"}) == ("bfloat16", (line.format("bfloat16"),))
    assert planned(gpu=False, dtype="bfloat16") == ("bfloat16", ())
    assert planned(gpu=True) == ("auto", ())


def test_a_gpu_shares_its_memory_with_the_trainer(project: Project) -> None:
    own = settings(str(project.folder / "model"), gpu_memory_utilization=0.5)
    command = str(vllm_command.build_command(own, 8235, gpu=True))
    assert "--gpu-memory-utilization 0.5" in command
    assert "--enforce-eager" not in command


def test_the_users_own_arguments_come_last(project: Project) -> None:
    plan = vllm_command.build_command(
        settings(str(project.folder / "model"), extra_args=("--seed", "3")), 8235, gpu=False
    )
    assert plan.arguments[-2:] == ("--seed", "3")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_the_error_for_an_invalid_model_folder_names_the_missing_file(
    project: Project, missing: str, message: str
) -> None:
    (project.folder / "model" / missing).unlink()
    with pytest.raises(CliError, match=message):
        vllm_command.check_model(str(project.folder / "model"))


def test_a_missing_vllm_is_reported(project: Project) -> None:
    with pytest.raises(CliError, match=r"vllm\.command: /nowhere/vllm was not found"):
        vllm_command.check_installed(settings(str(project.folder / "model"), command=("/nowhere/vllm",)))


@pytest.mark.parametrize("name", ["./models/mine", "~/no-such-model", "/no/such/model", "models/mine"])
def test_what_looks_like_a_path_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(CliError, match="no such folder: /"):
        vllm_command.check_model(name)
    assert vllm_command.check_model("other/mine") == "other/mine"


def test_on_few_cores_the_engine_binds_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert vllm_command.cpu_binding_environment(2) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    assert vllm_command.cpu_binding_environment(64) == {}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert vllm_command.cpu_binding_environment(2) == {}
