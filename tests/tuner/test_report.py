"""One report of three methods: only what can be compared stands side by side, the rest is named with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.api.reports import effect_cells
from ratchet.store.operation_records import Tuning
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState, TuningKind, TuningState
from ratchet.trainer.statistics import Compared, ComparisonVerdict, Missing, compare
from ratchet.tuner.reports import TuningReport, TuningResult, fingerprint, plain, read, report, task_set
from ratchet.tuner.rollouts.prices import UNKNOWN, Money, RolloutCost

TASKS = [f"task{number}" for number in range(10)]


def gain(after: float, before: float) -> Compared:
    return compare(dict.fromkeys(TASKS, (after,)), dict.fromkeys(TASKS, (before,)), names=("new", "old"))


@dataclass
class Runs:
    """Runs of the tuner, newest last."""

    made: list[Tuning]

    def add(self, method: Any, state: str = "done", error: str | None = None, **changes: Any) -> str:
        values: dict[str, Any] = {
            "method": method, "technique": "t", "alias": "policy", "task_set": task_set("tasks/", "test", TASKS),
            "judge": "judges:exact:1a2b", "workflow": "agent:run", "baseline": "old", "best": "new",
            "gain": gain(1.0, 0.0),
        }  # fmt: skip
        result: Mapping[str, Any] = plain(TuningResult(**(values | changes)))
        number = len(self.made)
        tuning = Tuning(
            id=f"tun_{number}", kind=TuningKind(method), alias="policy", state=TuningState(state), config={},
            started_at=float(number), result=result, error=error, ended_at=None if state == "running" else number + 0.5,
        )  # fmt: skip
        self.made.append(tuning)
        return tuning.id

    def report(self, **selection: Any) -> TuningReport:
        return report(list(reversed(self.made)), **selection)


def test_the_newest_finished_run_of_each_method_stands_side_by_side() -> None:
    runs = Runs([])
    older = runs.add("prompt", gain=gain(0.0, 1.0))
    runs.add("select-model", gain=gain(0.5, 0.5), spent=RolloutCost(prompt_tokens=5, money=UNKNOWN))
    runs.add(
        "prompt",
        spent=RolloutCost(prompt_tokens=10, money=Money(0.5)),
        notes=("a script stood in for the reflection model",),
    )
    runs.add("weights", promoted="policy@3")
    found = runs.report()
    assert [(row.method, row.tuning_id) for row in found.rows] == [
        ("select-model", "tun_1"), ("prompt", "tun_2"), ("weights", "tun_3"),
    ]  # fmt: skip
    verdicts = [row.effect.verdict for row in found.rows if row.effect]
    assert verdicts == [ComparisonVerdict.TIED, ComparisonVerdict.BETTER, ComparisonVerdict.BETTER]
    assert found.rows[2].promoted == "policy@3"
    assert [(one.tuning_id, one.why) for one in found.excluded] == [(older, "a newer run of this method is shown")]


def test_a_run_of_another_workflow_stands_there_and_says_so() -> None:
    runs = Runs([])
    runs.add("weights", workflow="agent:old", notes=("n",))
    runs.add("prompt")
    by_method = {row.method: row.notes for row in runs.report().rows}
    assert by_method == {
        "select-model": (), "prompt": (), "weights": ("n", "measured with another workflow, agent:old"),
    }  # fmt: skip


def test_runs_of_other_tasks_judges_and_aliases_are_left_out_with_the_reason() -> None:
    runs = Runs([])
    runs.add("prompt", task_set=task_set("other/", "test", TASKS[:4]))
    runs.add("prompt", judge="judges:kind:3c4d")
    runs.add("prompt", alias="mail")
    runs.add("weights")
    found = runs.report()
    assert [row.tuning_id for row in found.rows] == [None, None, "tun_3"]
    assert [one.why for one in found.excluded] == [
        "it tuned mail, not policy", "another judge: judges:kind:3c4d",
        "other held-out tasks: 4 of other/ (test), not the 10 of tasks/ (test)",
    ]  # fmt: skip
    other = runs.report(tasks="other/")
    assert [row.tuning_id for row in other.rows] == [None, "tun_0", None]
    assert runs.report(judge="judges:kind").rows[1].tuning_id == "tun_1"
    assert runs.report(alias="mail").rows[1].tuning_id == "tun_2"


def test_runs_that_did_not_finish_are_named_and_claim_nothing() -> None:
    runs = Runs([])
    runs.add("weights", state="failed", error="vLLM is gone")
    runs.add("prompt", state="running")
    runs.add("select-model", state="stopped")
    runs.made.append(Tuning(
        id="tun_odd", kind=TuningKind.PROMPT, alias="a", state=TuningState.DONE, config={}, started_at=9.0, result={}
    ))  # fmt: skip
    found = runs.report()
    assert (found.task_set, [row.tuning_id for row in found.rows]) == (None, [None] * 3)
    reasons = {one.tuning_id: one.why for one in found.excluded}
    assert reasons["tun_0"] == "it failed: vLLM is gone"
    assert (reasons["tun_1"], reasons["tun_2"]) == ("it has not ended", "it stopped")
    assert "cannot be read" in reasons["tun_odd"]


def test_a_run_of_which_every_rollout_failed_does_not_take_the_place_of_a_sound_one() -> None:
    runs = Runs([])
    sound = runs.add("weights")
    broken = dict.fromkeys(TASKS, (Missing.FAILED,))
    empty = runs.add("weights", best=None, gain=compare(broken, broken, names=("new", "old")))
    found = runs.report()
    assert found.rows[2].tuning_id == sound
    assert [(one.tuning_id, one.why) for one in found.excluded] == [(empty, "none of its held-out rollouts was scored")]
    half = runs.add("weights", gain=compare(broken, dict.fromkeys(TASKS, (1.0,)), names=("new", "old")))
    assert runs.report().rows[2].tuning_id == half


def test_only_the_version_that_serves_now_is_shown_as_serving() -> None:
    runs = Runs([])
    runs.add("select-model", best="policy@3")
    runs.add("prompt", best="prm_1", promoted="policy@4")
    runs.add("weights", best="policy@5", promoted="policy@5")

    def serving(version: int, prompt_id: str | None = None) -> list[str | None]:
        live = Policy(
            alias="policy", version=version, state=PolicyState.LIVE, served_name=f"policy@{version}", adapter=None,
            created_at=1.0, round_id=None, prompt_id=prompt_id,
        )  # fmt: skip
        return [row.serves for row in runs.report(live={"policy": live}).rows]

    assert serving(3) == ["policy@3", None, None]
    assert serving(4) == [None, "policy@4", None]
    assert serving(5, "prm_1") == [None, "policy@5", "policy@5"]
    assert serving(6) == [None] * 3


def test_evaluations_are_no_method() -> None:
    runs = Runs([])
    runs.add("eval")
    found = runs.report()
    assert (found.task_set, found.excluded) == (None, ())


def test_a_run_that_found_nothing_says_so_instead_of_not_measured() -> None:
    runs = Runs([])
    runs.add("prompt", best=None, gain=None)
    runs.add("select-model", best="old", gain=None)
    runs.add("weights", best=None, gain=None)
    effects = {row.method: effect_cells(row)[2] for row in runs.report().rows}
    assert effects == {
        "prompt": "nothing better found on validation", "select-model": "unchanged",
        "weights": "nothing better found",
    }  # fmt: skip
    runs.add("weights", best=None, gain=None, promoted="policy@4")
    assert effect_cells(runs.report().rows[2])[2] == "not measured"


def test_a_result_is_read_back_as_it_was_written() -> None:
    gain = compare({"a": (1.0,), "b": (1.0,)}, {"a": (0.0,), "b": (1.0,)}, names=("policy@1", "policy@0"))
    result = TuningResult(
        method="weights", technique="GRPO", alias="policy", task_set=task_set("tasks/", "test", ["a", "b"]),
        judge="judge:1234", workflow="agent:workflow", baseline="policy@0", best="policy@1", gain=gain,
        spent=RolloutCost(rollouts=4, prompt_tokens=100, money=UNKNOWN), promoted="policy@1",
        details={"rounds": [1, 2]},
    )  # fmt: skip
    assert read(json.loads(json.dumps(plain(result)))) == result


def test_the_same_tasks_have_the_same_name_in_any_order() -> None:
    assert fingerprint(["a", "b", "a"]) == fingerprint(["b", "a"]) != fingerprint(["a", "c"])
    assert fingerprint(["mail/a", "math/b"]) == fingerprint(["a", "b"])
    assert len(fingerprint([])) == 16
