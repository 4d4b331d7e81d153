"""A new agent that starts from an existing PEFT adapter: what PEFT computes is what the learner computes and serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from ratchet import __version__
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError, SettingError
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import LearnerStatus, OpenRequest, OperationRequest, encode
from ratchet.trainer.learner_service.operations import AgentOperations, CheckpointReferences
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.scripted_learner import ScriptedHost
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_row, build_rows

PROCESS = LearnerProcessSettings(threads=1, token_budget=256)
PLAIN = LearnerSettings(learning_rate=1e-2, sequence_mask_threshold=None)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, **changes: object) -> Path:
    """Write an adapter with random weights as PEFT's users do."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False} | changes
    torch.manual_seed(11)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**config))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def host(tiny_model: Path) -> LearnerHost:
    return LearnerHost(str(tiny_model), PROCESS)


def state_of(host: LearnerHost, agent: str, folder: Path) -> dict[str, bytes]:
    host.save(agent, folder)
    names = ("lora.safetensors", "optimizer.pt", "rng.pt")
    return {name: (folder / "learner" / name).read_bytes() for name in names}


def test_the_learner_computes_what_peft_computes_and_trains_on_from_there(
    host: LearnerHost, adapter: Path, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert host.open("mail", replace(PLAIN, init_adapter=str(adapter)), None) == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.tensor([build_row(3).ids])
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, adapter)(ids).logits[0, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    (started,) = host.score("mail", [build_row(3).ids])
    assert started[1:] == pytest.approx(logprobs, abs=1e-4)
    assert host.score("mail", [build_row(3).ids], adapter=adapter) == [started]
    host.save("mail", tmp_path / "0001")
    kept, given = (
        safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())
        for folder in (tmp_path / "0001", adapter)
    )
    assert kept.keys() == given.keys()
    assert all(torch.equal(kept[name], given[name]) for name in given)
    assert host.train_round("mail", build_rows(6, seed=1)).weight_change > 0
    assert host.score("mail", [build_row(3).ids]) != [started]


def test_it_is_isolated_and_a_commit_counts_before_the_adapter(
    host: LearnerHost, adapter: Path, tiny_model: Path, tmp_path: Path
) -> None:
    mail = replace(PLAIN, init_adapter=str(adapter))
    host.open("support", PLAIN, None)
    before = state_of(host, "support", tmp_path / "before")
    host.open("mail", mail, None)
    host.train_round("mail", build_rows(6, seed=1))
    saved = state_of(host, "mail", tmp_path / "0001")
    assert state_of(host, "support", tmp_path / "after") == before
    host.train_round("mail", build_rows(6, seed=2))
    on = state_of(host, "mail", tmp_path / "0002")
    again = LearnerHost(str(tiny_model), PROCESS)
    assert again.open("mail", mail, tmp_path / "0001") == 1
    assert state_of(again, "mail", tmp_path / "resumed") == saved != on
    again.train_round("mail", build_rows(6, seed=2))
    assert state_of(again, "mail", tmp_path / "on") == on


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, " 8: set learner.lora_r to 4"),
        ({"lora_alpha": 64}, " 16: set learner.lora_alpha to 64"),
        ({"target_modules": ["q_proj"]}, "model.layers.0.mlp.down_proj.lora_A and 23 other"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save"),
    ],
)
def test_another_adapter_is_refused_with_the_remedy(
    host: LearnerHost, tiny_model: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_adapter(tiny_model, tmp_path / "other", **changes)
    host.open("mail", PLAIN, None)
    rows = build_rows(2, seed=9)
    before = host.score("mail", rows)
    with pytest.raises(CheckpointError, match=message):
        host.open("mail", replace(PLAIN, init_adapter=str(folder)), None)
    assert host.score("mail", rows) == before


def test_an_adapter_of_a_model_of_another_shape_is_refused_with_the_layer(
    host: LearnerHost, adapter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    weights = safetensors.torch.load((adapter / "adapter_model.safetensors").read_bytes())
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    narrow = weights | {name: weights[name][:, :32].contiguous()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save(narrow))
    with pytest.raises(CheckpointError, match=r"has model.layers.1.self_attn.q_proj.lora_A of shape \(8, 32\), and"):
        host.open("mail", replace(PLAIN, init_adapter=str(folder)), None)
    more = weights | {name.replace("layers.1", "layers.2"): weights[name].clone()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save(more))
    with pytest.raises(CheckpointError, match=r"adapts model.layers.2.self_attn.q_proj.lora_A, which the learner"):
        host.open("mail", replace(PLAIN, init_adapter=str(folder)), None)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointDamaged, match="has no readable adapter"):
        host.open("mail", replace(PLAIN, init_adapter=str(folder)), None)
    with pytest.raises(CheckpointDamaged, match="is not the folder of a PEFT adapter"):
        host.open("mail", replace(PLAIN, init_adapter=str(tmp_path / "absent")), None)


def test_the_name_of_another_base_model_is_a_warning(
    host: LearnerHost, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host.open("mail", replace(PLAIN, init_adapter=str(adapter)), None)
    assert "init_adapter_of_another_base_model" not in caplog.text
    folder = tmp_path / "other"
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "Org/Other-7B"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    with caplog.at_level(logging.WARNING):
        host.open("mail", replace(PLAIN, init_adapter=str(folder)), None)
    assert "event=init_adapter_of_another_base_model" in caplog.text
    assert "adapter_base_model=Org/Other-7B" in caplog.text


def test_a_copied_adapter_without_a_learners_state_starts_with_a_new_optimizer(
    host: LearnerHost, adapter: Path, tmp_path: Path
) -> None:
    def copy(aside: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (aside / name).write_bytes((adapter / name).read_bytes())
        (aside / checkpoint.ADAPTER_ONLY).parent.mkdir()
        (aside / checkpoint.ADAPTER_ONLY).write_text("mail@7\n")

    checkpoint.write_atomically(tmp_path / "0001", copy)
    rows = build_rows(3, seed=9)
    host.open("mail", replace(PLAIN, init_adapter=str(adapter)), None)
    assert host.open("support", PLAIN, tmp_path / "0001") == 0
    assert host.score("support", rows) == host.score("mail", rows)
    (tmp_path / "0001" / checkpoint.ADAPTER_ONLY).unlink()
    with pytest.raises(CheckpointDamaged, match="not a complete checkpoint of a learner"):
        host.open("support", PLAIN, tmp_path / "0001")


@pytest.mark.slow
def test_a_new_agent_serves_the_adapter_once_there_is_traffic_to_prove_it_with(
    store: Store,
    make_controller: Callable[..., SteppedController],
    engine: ScriptedEngine,
    adapter: Path,
    tmp_path: Path,
) -> None:
    settings = replace(PLAIN, init_adapter=str(adapter))
    controller = make_controller(learner=settings)
    controller.step(1000.0)
    controller.step(1001.0)
    waiting = store.policies.get("agent", 1)
    assert (waiting.state, waiting.evidence) == (PolicyState.CANDIDATE, {"origin": {"init_adapter": str(adapter)}})
    assert engine.loaded == {}
    agents_work(store, "first", [1.0])
    controller.step(1002.0)
    live = store.policies.live()["agent"]
    assert live.version == 1
    assert live.evidence["proof"][engine.url]["against"] == "base"
    assert engine.loaded == {"agent@1": str(tmp_path / "checkpoints" / "0001")}

    agents_work(store, "a", [0.0, 1.0], version=1)
    agents_work(store, "b", [1.0, 0.0], version=1)
    restarted = make_controller(learner=settings)
    restarted.step(2000.0)
    assert store.policies.live()["agent"].version == 2
    assert [held.from_version for held in store.rounds.page("agent")] == [1, 0]
    store.policies.roll_back("agent", 0, {}, by="ann", reason="worse than the base")
    make_controller(learner=settings).step(3000.0)
    assert [policy.version for policy in store.policies.all("agent")] == [0, 1, 2], "it is not committed again"


def test_an_open_round_of_a_dead_trainer_does_not_hinder_the_adapter(
    store: Store, make_controller: Callable[..., SteppedController], adapter: Path
) -> None:
    store.rounds.start("agent", 0)
    agents_work(store, "first", [1.0])
    make_controller(learner=replace(PLAIN, init_adapter=str(adapter))).step(1000.0)
    assert store.policies.live()["agent"].version == 1


class ScriptedReferences(CheckpointReferences):
    """An adapter store with every version in the same local folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.fetched: list[tuple[str, bool]] = []

    def fetch(self, reference: str, *, state: bool = True) -> Path:
        self.fetched.append((reference, state))
        return self.folder


class NotingHost(ScriptedHost):
    """A host that notes the adapters that agents start from."""

    def __init__(self) -> None:
        super().__init__()
        self.initial: list[str | None] = []

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int:
        self.initial.append(settings.init_adapter)
        return super().open(agent, settings, resume_from)


def test_the_learner_fetches_the_reference_of_an_adapter_unless_there_is_a_commit(tmp_path: Path) -> None:
    references, host = ScriptedReferences(tmp_path / "fetched"), NotingHost()
    operations = AgentOperations(host, {}, references, LearnerStatus("one", __version__, "base", {}, "none", 1, 1))
    mail = replace(PLAIN, init_adapter="s3://bucket/mail/checkpoints/0007")

    def open_agent(source: str | None) -> None:
        arguments = msgspec.Raw(encode(OpenRequest(mail, source, __version__, {})))
        operations.run(OperationRequest("mail", "open", arguments))

    open_agent(None)
    assert (references.fetched, host.initial) == ([(mail.init_adapter, False)], [str(tmp_path / "fetched")])
    with pytest.raises(CheckpointDamaged):  # the commit is asked for, not the adapter
        open_agent("/c/0001")
    assert references.fetched[1:] == [("/c/0001", True)]


def test_a_folder_is_absolute_so_that_the_learner_finds_it_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LearnerSettings(init_adapter="mail-lora").init_adapter == str(tmp_path / "mail-lora")
    with pytest.raises(SettingError, match="is ''; it must be null, a folder"):
        LearnerSettings(init_adapter="")
