"""Claims about `ratchet plan`: it needs a config.json only, and what it prints can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.settings.load_settings import load
from tests.harness.cli.project import Project
from tests.harness.json_server import IncomingRequest, JsonServer

SEVEN_B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    return str(folder)


@pytest.mark.parametrize("gpus", ["8x80GB", "1x48GB", "2 x 80"])
def test_the_printed_settings_are_a_valid_ratchet_yaml(project: Project, model: str, gpus: str) -> None:
    done = project.call("plan", "--base-model", model, "--gpus", gpus, "--context", "8192")
    assert done.returncode == 0, done.stdout
    printed = done.stdout.partition("# ratchet.yaml\n")[2].partition("\n\n")[0]
    file = project.folder / "planned.yaml"
    file.write_text(printed)
    settings = load(file, environ={})
    assert settings.base_model == model
    assert settings.vllm.max_model_len == 8192
    assert settings.trainer.learner.max_length == 8192


def test_the_plan_as_json_has_every_figure(project: Project, model: str) -> None:
    content: dict[str, Any] = json.loads(project.call("plan", "--base-model", model, "--gpus", "80GB", "--json").stdout)
    assert content["parameters"] == 7_615_616_512
    assert content["shared"] is True
    assert content["request"]["context"] == 32768
    assert set(content["learner"]["memory"]) == {
        "weights", "adapter", "gradients", "optimizer", "activations", "runtime", "host",
    }  # fmt: skip
    assert content["settings"]["vllm"]["gpu_memory_utilization"] == content["gpu_memory_utilization"]
    assert yaml.safe_dump(content["settings"])


def test_bad_input_is_refused_with_the_remedy(project: Project, model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for arguments, says in (
        (("--base-model", model, "--gpus", "24GB"), "does not fit on 1 GPU(s) of 24 GiB"),
        (("--base-model", model, "--gpus", "many"), "'many' are no GPUs; write 8x80GB"),
        (("--base-model", model, "--gpus", "0x80GB"), "are no GPUs"),
        (("--base-model", model, "--gpus", "99999999x80GB"), "a plan is for at most 512 GPUs"),
        (("--base-model", model, "--gpus", "80GB", "--context", "65536"), "more than the model's own 32768"),
        (("--base-model", model, "--gpus", "80GB", "--lora-r", "513"), "513 is not in the range 1<=x<=512"),
        (("--base-model", str(empty), "--gpus", "24GB"), "has no config.json: name the folder that holds it"),
        (("--base-model", str(broken), "--gpus", "24GB"), "cannot be read as JSON"),
        (("--base-model", "./absent", "--gpus", "24GB"), "./absent: no such folder"),
        (("--base-model", "not a name", "--gpus", "24GB"), "neither a folder nor a hub name"),
    ):
        done = project.call("plan", *arguments)
        assert done.returncode != 0
        assert says in done.stdout, done.stdout
    offline = project.call("plan", "--base-model", "acme/seven", "--gpus", "24GB", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1


def test_of_a_hub_name_only_the_config_is_read(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def respond(request: IncomingRequest) -> tuple[int, Any]:
        return (200, SEVEN_B) if request.path == "/acme/seven/resolve/main/config.json" else (404, "")

    hub = JsonServer(respond)
    try:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        done = project.call("plan", "--base-model", "acme/seven", "--gpus", "80GB")
        assert done.returncode == 0, done.stdout
        assert "7.62 billion parameters" in done.stdout
        absent = project.call("plan", "--base-model", "acme/absent", "--gpus", "80GB")
        assert "without a config.json" in absent.stdout
    finally:
        hub.close()
