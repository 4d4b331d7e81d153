"""vLLM holds what all agents may need; too few places are refused, slots that are too few for a batch are named."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.errors import SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.supervisor.vllm_command import (
    LORA_RESOLVER,
    build_command,
    describe_thrashing,
    held_adapters,
    max_cpu_loras,
)
from tests.ratchet.test_cpu_plugin import POLICY


def project(agents: int = 1, **values: Any) -> Settings:
    entries = {f"agent{n}": {"judge": "a:b"} for n in range(agents)} if agents > 1 else {}
    return Settings.of({"base_model": str(POLICY), "agents": entries, **values})


def argument(settings: Settings, name: str) -> str:
    arguments = build_command(settings, 8001, gpu=False).arguments
    return arguments[arguments.index(name) + 1]


def test_the_places_in_memory_follow_the_number_of_agents() -> None:
    assert held_adapters(project()) == 8
    assert argument(project(), "--max-cpu-loras") == "8"
    assert argument(project(agents=4), "--max-cpu-loras") == "32"
    assert argument(project(agents=4, trainer={"keep_loaded_adapters": 0}), "--max-cpu-loras") == "24"
    assert argument(project(vllm={"max_cpu_loras": 40}), "--max-cpu-loras") == "40"


@pytest.mark.parametrize(
    ("agents", "vllm", "least"),
    [(3, {"max_cpu_loras": 20}, 24), (1, {"max_cpu_loras": 4}, 8), (1, {"max_cpu_loras": 6, "max_loras": 9}, 9)],
)
def test_too_few_places_are_refused_with_the_figure(agents: int, vllm: dict[str, int], least: int) -> None:
    with pytest.raises(SettingsError, match=rf"vllm\.max_cpu_loras .* set {least} or more"):
        max_cpu_loras(project(agents, vllm=vllm))


def test_slots_that_thrash_are_a_warning_with_the_figure() -> None:
    assert describe_thrashing(project()) is None
    assert describe_thrashing(project(agents=5)) is None
    assert "set vllm.max_loras to 6" in (describe_thrashing(project(agents=2, vllm={"max_loras": 4})) or "")
    assert "set vllm.max_loras to 18" in (describe_thrashing(project(agents=6)) or "")


@pytest.mark.parametrize(("agents", "slots"), [(1, "4"), (3, "9"), (6, "16")])
def test_the_slots_of_a_batch_follow_the_number_of_agents(agents: int, slots: str) -> None:
    assert argument(project(agents), "--max-loras") == slots


def test_vllm_gets_the_plug_in_only_for_object_storage() -> None:
    local = build_command(project(adapters={"store": "/shared/adapters"}), 8001, gpu=True).environment
    assert "PYTHONPATH" not in local
    remote = build_command(project(adapters={"store": "s3://bucket/ratchet/"}), 8001, gpu=True).environment
    assert remote["PYTHONPATH"].split(":")[0] == str(LORA_RESOLVER)
    assert remote["RATCHET_ADAPTER_STORE"] == "s3://bucket/ratchet"
    assert (LORA_RESOLVER / "ratchet_lora_resolver.py").is_file()
    (found,) = LORA_RESOLVER.glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]" in found.read_text()


@pytest.mark.parametrize(
    ("store", "words"),
    [("s3://", "names no bucket"), ("s3://key:secret@bucket/x", "credentials: give them by")],
)
def test_a_store_that_cannot_be_meant_is_refused(store: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refusal:
        project(adapters={"store": store})
    assert "secret" not in str(refusal.value)
