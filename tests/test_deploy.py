"""What is deployed elsewhere: images, compose file and unit say what the code says, and run as nobody special."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml

from ratchet.cli import cli
from ratchet.settings.load_settings import load
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import vllm_command

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy" / "ratchet.service").read_text()


@pytest.fixture
def services() -> dict[str, Any]:
    """The services of the compose file."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    return found


def test_vllm_is_started_as_up_starts_it(services: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    options: dict[tuple[str, ...], tuple[str, Any]] = {
        ("base_model",): ("x", str(tmp_path)),
        ("model",): ("x", "agent"),
        ("vllm", "gpu_memory_utilization"): ("x", 0.9),
    }
    planned = vllm_command.build_command(load(None, options, {}), 8000, gpu=True)
    given = iter(planned.arguments[4:])
    wanted = re.findall(r"--[\w-]+(?:=(?!-)[^\s]+)?", " ".join(given).replace(" ", "=").replace("=--", " --"))
    theirs = {"--host", "--dtype", "--model", "--tool-call-parser", "--gpu-memory-utilization"}  # by image, or .env
    command = services["vllm"]["command"]
    assert set(wanted) - {one for one in wanted if one.partition("=")[0] in theirs} <= set(command)
    assert {one.partition("=")[0] for one in command} <= {one.partition("=")[0] for one in wanted}
    assert {k: v for k, v in planned.environment.items() if k != "HF_HUB_OFFLINE"}.items() <= (
        services["vllm"]["environment"].items()
    )


def test_the_production_page_tells_the_arguments_that_proxy_and_trainer_rest_on(services: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "production.md").read_text().replace("\n  ", " ")
    telling = ("--enable-lora", "--max-", "--enable-scale", "--logprobs", "--generation")
    for argument in services["vllm"]["command"]:
        if argument.startswith(telling):
            assert argument.replace("=", " ") in page


@pytest.mark.parametrize("name", ["proxy", "trainer", "learner"])
def test_every_command_can_be_typed_and_every_variable_is_a_setting(services: dict[str, Any], name: str) -> None:
    service = services[name]
    targets = dict(re.findall(r"AS (\w+)\n(?:.*\n)*?ENTRYPOINT (\[.*\])", DOCKERFILE))
    entrypoint = service.get("entrypoint") or json.loads(targets[service["build"]["target"]])
    program, called, *words = cast("list[str]", entrypoint + service["command"])
    assert program == "ratchet"
    command = cast("click.Group", cli).get_command(click.Context(cli), called)
    assert command is not None
    options = command.make_context(called, words).params
    environ = {key: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for key, value in service["environment"].items()}
    settings = load(environ={key: value for key, value in environ.items() if key.startswith("RATCHET_")})
    if name == "proxy":
        assert settings.proxy.workers == 1
    if name == "trainer":
        assert settings.learner.url == "http://learner:8002"
    if name == "learner":
        assert (options["host"], options["port"]) == ("0.0.0.0", 8002)


def test_releases_are_pinned_and_vllm_is_the_one_that_is_tested(services: dict[str, Any]) -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    image = "vllm/vllm-openai:v" + extras["vllm"][0].partition("==")[2]
    assert services["vllm"]["image"] == image
    assert f"\nFROM {image} AS vllm\n" in DOCKERFILE
    for service in services.values():
        assert "build" in service or re.search(r":v?\d+\.\d+", service["image"])
    assert re.search(r"^FROM python:3\.\d+-slim-\w+ AS proxy$", DOCKERFILE, re.MULTILINE)


def test_every_service_starts_again_and_has_its_secrets_from_outside(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        for name, value in service["environment"].items():
            if re.search(r"KEY|PASSWORD|TOKEN", name):
                assert value.startswith("${")
    assert "ports" not in services["vllm"]
    assert "ports" not in services["db"]


def test_vllm_sees_the_adapters_where_the_trainer_writes_them(services: dict[str, Any]) -> None:
    folder = re.search(r"^ENV RATCHET_STATE_DIR=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert folder is not None
    written = StateFolder(Path(folder[1]) / "default").checkpoints("agent")
    assert written.is_relative_to("/state")
    assert "trainer:/state" in services["trainer"]["volumes"]
    assert "trainer:/state" in services["learner"]["volumes"]
    assert "trainer:/state:ro" in services["vllm"]["volumes"]
    assert "proxy:/state" in services["proxy"]["volumes"], "a journal that outlives its container"


def test_images_run_as_a_user_that_kubernetes_knows_for_no_root() -> None:
    stages = DOCKERFILE.split("\nFROM ")[1:]
    assert len(stages) == 3
    for stage in stages:
        users = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        assert users[-1].isdigit()
        assert int(users[-1]) > 0
    assert json.loads(re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])[0] == "python"


def test_the_unit_gives_up_longer_to_stop_than_up_takes() -> None:
    from ratchet.supervisor.supervisor import _STOP_TIMEOUT

    stop = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert stop is not None
    assert float(stop[1]) > 2 * _STOP_TIMEOUT
    assert "Restart=on-failure" in UNIT
    assert not re.search(r"^User=root$", UNIT, re.MULTILINE)
