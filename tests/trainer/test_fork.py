"""A version of one agent as a candidate of another: copied, proven, trained on from, and refused where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import s3fs

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.store import Store
from ratchet.store.verify import verify
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.errors import CheckpointError, SettingError
from ratchet.trainer.release.adopted import Fork, ForkTarget, fork
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import commit_round
from tests.harness.s3 import BUCKET, S3Server
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController

SETTINGS = LearnerSettings(learning_rate=1e-2, sequence_mask_threshold=None)
WEIGHTS = Path(checkpoint.STATE) / "lora.safetensors"


@pytest.fixture
def target(store: Store, tmp_path: Path) -> ForkTarget:
    """An agent without traffic. Its name is before the source's in every order."""
    store.policies.register_base("a-new-one", "base")
    return ForkTarget("a-new-one", str(tmp_path / "new" / "checkpoints"), SETTINGS)


@pytest.fixture
def trained(store: Store, make_controller: Callable[..., SteppedController]) -> SteppedController:
    """The source: agent@1 is live."""
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller = make_controller()
    controller.step(1000.0)
    assert store.policies.live()["agent"].version == 1
    return controller


def copied(store: Store, target: ForkTarget, tmp_path: Path, version: int = 1) -> Fork:
    adapters = AdapterStore(tmp_path / "cache")
    return fork(store, adapters, store.policies.get("agent", version), target, by="ann")


@pytest.mark.slow
def test_a_fork_is_proven_before_the_agent_has_any_traffic_and_trained_on_from(
    store: Store,
    trained: SteppedController,
    target: ForkTarget,
    make_controller: Callable[..., SteppedController],
    engine: ScriptedEngine,
    tmp_path: Path,
    store_file: Path,
) -> None:
    source = Path(store.policies.get("agent", 1).adapter or "")
    done = copied(store, target, tmp_path)
    folder = tmp_path / "new" / "checkpoints" / "0001"
    assert (done.with_state, done.candidate.adapter, done.candidate.state) == (True, str(folder), "candidate")
    assert checkpoint.complete(folder)
    for name in (WEIGHTS, Path("adapter_model.safetensors"), Path(checkpoint.STATE) / "optimizer.pt"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()

    controller = make_controller(model="a-new-one", checkpoints=folder.parent)
    assert controller.learner.step == 1  # the optimizer goes on
    controller.step(2000.0)
    live = store.policies.live()["a-new-one"]
    assert (live.version, live.served_name) == (1, "a-new-one@1")
    assert live.evidence["origin"] == {"forked_from": {"alias": "agent", "version": 1}, "by": "ann"}
    assert live.evidence["proof"][engine.url]["outcome"] == "proven"
    assert engine.loaded["a-new-one@1"] == str(folder)

    agents_work(store, "c", [0.0, 1.0], alias="a-new-one", version=1)
    agents_work(store, "d", [1.0, 0.0], alias="a-new-one", version=1)
    controller.step(3000.0)
    assert store.policies.live()["a-new-one"].version == 2
    assert [held.from_version for held in store.rounds.page("a-new-one")] == [1, 0]
    assert controller.learner.step == 2
    assert store.policies.live()["agent"].version == 1
    assert verify(str(store_file)).sound


@pytest.mark.slow
def test_a_running_trainer_takes_up_the_fork_and_goes_back_if_it_is_rejected(
    store: Store,
    trained: SteppedController,
    target: ForkTarget,
    make_controller: Callable[..., SteppedController],
    tmp_path: Path,
) -> None:
    controller = make_controller(model="a-new-one", checkpoints=tmp_path / "new" / "checkpoints")
    for task in ("c", "d"):
        agents_work(store, task, [0.0, 1.0], alias="a-new-one")
    controller.step(1500.0)
    assert copied(store, target, tmp_path).candidate.version == 2
    controller.step(2000.0)
    assert store.policies.live()["a-new-one"].version == 2
    store.policies.roll_back("a-new-one", 1, {}, by="ann", reason="worse")
    for task in ("e", "f"):
        agents_work(store, task, [0.0, 1.0], alias="a-new-one", version=1)
    controller.step(3000.0)
    assert [(held.to_version, held.from_version) for held in store.rounds.page("a-new-one")] == [(3, 1), (2, 0), (1, 0)]


def test_without_the_learners_state_the_adapter_is_copied_and_the_optimizer_starts_over(
    store: Store,
    trained: SteppedController,
    target: ForkTarget,
    make_controller: Callable[..., SteppedController],
    tmp_path: Path,
) -> None:
    source = Path(store.policies.get("agent", 1).adapter or "")
    checkpoint.prune(source.parent, {1}, set())
    assert not (source / checkpoint.STATE).exists()
    assert not copied(store, target, tmp_path).with_state
    controller = make_controller(model="a-new-one", checkpoints=tmp_path / "new" / "checkpoints")
    assert controller.learner.step == 0
    controller.step(2000.0)
    assert store.policies.live()["a-new-one"].version == 1


def test_what_cannot_be_forked_is_refused_and_nothing_is_copied(
    store: Store, trained: SteppedController, target: ForkTarget, tmp_path: Path
) -> None:
    def refused(error: type[Exception], message: str, to: ForkTarget = target, version: int = 1) -> None:
        with pytest.raises(error, match=message):
            copied(store, to, tmp_path, version)
        assert not Path(to.versions).exists() or to.alias == "agent"

    refused(SettingError, "agent@0 has no adapter: it is the base model", version=0)
    refused(SettingError, "a version of agent already: to go back to it", replace(target, alias="agent"))
    refused(RecordNotFound, "no-such-agent is no agent of this store", replace(target, alias="no-such-agent"))
    other = replace(target, learner=replace(SETTINGS, lora_alpha=64))
    refused(CheckpointError, "lora_alpha 16, and learner.lora_alpha of a-new-one is 64: set it to 16", other)
    store.rounds.start("a-new-one", 0)
    with pytest.raises(InvalidTransition, match="a round of a-new-one is open: try again"):
        copied(store, target, tmp_path)
    store.rounds.abandon(store.rounds.page("a-new-one")[0].id, "test")
    assert store.policies.all("a-new-one")[1:] == []

    made = copied(store, target, tmp_path)
    with pytest.raises(InvalidTransition, match=f"a-new-one@{made.candidate.version} is a candidate that is not"):
        copied(store, target, tmp_path)
    store.policies.reject("a-new-one", made.candidate.version, {})
    store.policies.roll_back("agent", 0, {}, by="ann", reason="worse")
    store.policies.prune("agent", 1, 5.0)
    refused_pruned = pytest.raises(SettingError, match="agent@1 was pruned")
    with refused_pruned:
        copied(store, target, tmp_path)


def test_a_deletion_names_the_forks_of_what_was_trained_on_it(
    store: Store, trained: SteppedController, target: ForkTarget, tmp_path: Path
) -> None:
    copied(store, target, tmp_path)
    store.deletions.delete(TrajectoryFilter(id="a-0"), "asked")
    affected = store.deletions.versions_with_deleted_data()
    assert [(one.alias, one.version, one.trained_directly) for one in affected] == [
        ("a-new-one", 1, False),
        ("agent", 1, True),
    ]


def test_the_lineage_of_a_fork_is_that_of_the_version_that_it_is_a_copy_of(
    store: Store, trained: SteppedController, target: ForkTarget, tmp_path: Path
) -> None:
    copied(store, target, tmp_path)
    assert store.lineage.versions_of(["a-0"]) == {"a-0": ("agent@1", "a-new-one@1")}
    own = store.lineage.training_data_of(store.policies.get("agent", 1))
    data = store.lineage.training_data_of(store.policies.get("a-new-one", 1))
    assert [held.alias for held in data.rounds] == ["agent", "a-new-one"]
    assert (data.families, data.judges) == (own.families, own.judges)


@pytest.mark.slow
def test_versions_in_object_storage_are_copied_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server(tmp_path)
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        adapters, source = AdapterStore(tmp_path / "cache"), f"s3://{BUCKET}/agent/checkpoints/0001"
        adapters.write(source, lambda folder: checkpoint.write_atomically(folder, write_version))
        commit_round(store, "agent", 1, checkpoint=source)
        store.policies.promote("agent", 1, {})
        store.policies.register_base("support", "base")
        target = ForkTarget("support", f"s3://{BUCKET}/support/checkpoints", SETTINGS)
        done = fork(store, adapters, store.policies.get("agent", 1), target, by="ann")
        assert (done.candidate.adapter, done.with_state) == (f"{target.versions}/0001", True)
        elsewhere = AdapterStore(tmp_path / "elsewhere").fetch(f"{target.versions}/0001")
        assert (elsewhere / "adapter_model.safetensors").read_bytes() == b"weights"
        assert json.loads((elsewhere / checkpoint.STATE / "state.json").read_text())["settings"]["lora_r"] == 8
        assert not (elsewhere / checkpoint.ADAPTER_ONLY).exists()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.close()


def write_version(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / checkpoint.STATE).mkdir()
    settings = {"lora_r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    (folder / checkpoint.STATE / "state.json").write_text(json.dumps({"settings": settings}))
