"""What TensorBoard itself reads of a training."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ratchet.store.store import Store, open_store
from ratchet.trainer.observability.monitors import monitored
from tests.harness.cli.project import Project
from tests.harness.records import commit_round, judged_group
from tests.trainer.test_metrics import WAIT, committed_round


def curve(read: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, round(point.value, 6)) for point in read.Scalars(name)]


def test_tensorboard_draws_rounds_and_decisions_by_version(store: Store, tmp_path: Path) -> None:
    committed_round(store, 1)
    with monitored(store, "agent", ["tensorboard"], tmp_path / "monitors", WAIT):
        committed_round(store, 2, reward=0.75)
    read = EventAccumulator(str(tmp_path / "monitors" / "tensorboard")).Reload()
    assert curve(read, "round/reward") == [(1, 0.5), (2, 0.75)]
    assert curve(read, "round/kl") == [(1, 0.01), (2, 0.01)]
    assert curve(read, "round/families/math/reward") == [(1, 0.75), (2, 0.75)]
    assert curve(read, "untrained_tokens/greedy") == [(1, 10), (2, 10)]
    assert curve(read, "round/tokens_per_trajectory") == [(1, 10), (2, 10)]
    assert curve(read, "decision/proof/worst") == [(1, 0.001), (2, 0.001)]
    assert not [name for name in read.Tags()["scalars"] if "settings" in name]
    notes = [one.tensor_proto.string_val[0] for one in read.Tensors("decision")]
    assert notes[-1] == b"agent@2: promote by proof: its logprobs are the trainer's"


def test_past_training_is_drawn_for_tensorboard_from_the_store(project: Project) -> None:
    project.write(store="sqlite:///s.db")
    store = open_store(str(project.folder / "s.db"))
    assert "no round and no decision of policy" in project.run("status", "--tensorboard", "nothing").stdout
    group = judged_group(store, ["a", "b"], [0.0, 1.0], alias="policy")
    commit_round(store, "policy", 1, checkpoint="x", groups=[group.id], metrics={"reward": 0.5})
    store.close()
    assert project.run("status", "--tensorboard", "drawn").stdout == "1 points: tensorboard --logdir drawn\n"
    read = EventAccumulator(str(project.folder / "drawn")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("round/reward")] == [(1, 0.5)]
    assert "is not empty" in project.run("status", "--tensorboard", "drawn").stdout
