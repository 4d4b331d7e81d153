"""Which sealed trajectories become groups: claims on a store without a trainer."""

from __future__ import annotations

import msgspec

from ratchet.store.store import Store
from ratchet.trainer.controller.advantages import ScoreHistory
from ratchet.trainer.controller.collect.collector import RoleResolver, TrajectoryCollector
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness import records


def test_a_trajectory_whose_messages_were_lost_is_put_aside_and_the_others_are_grouped(store: Store) -> None:
    torn = [{"role": "system", "content": "Lost."}, {"role": "user", "content": "Where?"}]
    for name in ("torn", "one", "two"):
        start = records.call_start(f"call_{name}", name, torn if name == "torn" else records.QUESTION, task="t")
        if name == "torn":
            start = msgspec.structs.replace(start, nodes=start.nodes[1:])
        store.calls.ship([records.ended(start, {"role": "assistant", "content": name})])
        store.trajectories.seal(name, 2.0)
    settings = TrainerSettings(
        store="s", model="agent", base_model="b", vllm=("http://127.0.0.1:1",), checkpoints="c", num_generations=2,
        judge="tests.harness.trainer.judge_samples:scripted", group_wait_seconds=1.0,
    )  # fmt: skip
    assembly = TrajectoryCollector(store, settings, RoleResolver(store, "agent", Roles()), ScoreHistory(), None)
    for now in (10.0, 11.0):
        assembly.step(now, now)
    assembly.close()
    assert store.trajectories.get("torn").drop_reason == "incomplete"
    assert [set(group.members) for group in store.groups.page()] == [{"one", "two"}]
