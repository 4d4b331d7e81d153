"""A result survives the store, and a set of tasks has one name."""

from __future__ import annotations

import json

from ratchet.trainer.statistics import compare
from ratchet.tuner.reports import TuningResult, fingerprint, plain, read, task_set
from ratchet.tuner.rollouts.prices import UNKNOWN, RolloutCost


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
