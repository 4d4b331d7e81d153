"""Whose operation the learner runs next: turns by share, short operations first, and nobody starves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ratchet.trainer.learner_service.fair_queue import MAX_LAG_SECONDS, MAX_SHORT_IN_A_ROW, FairQueue


def run(queue: FairQueue[str], lengths: dict[str, float], seconds: float) -> dict[str, float]:
    """Run rounds of agents that always have one waiting; return their compute times."""
    used = dict.fromkeys(lengths, 0.0)
    for agent in lengths:
        queue.push(agent, "round", is_round=True)
    while sum(used.values()) < seconds:
        popped = queue.pop()
        assert popped is not None
        agent = popped[0]
        queue.push(agent, "round", is_round=True)
        queue.charge(agent, lengths[agent])
        used[agent] += lengths[agent]
    return used


@pytest.mark.parametrize("seed", range(20))
def test_compute_time_follows_the_shares_within_one_round_of_each(seed: int) -> None:
    dice = random.Random(seed)
    lengths = {f"agent{number}": dice.choice([0.1, 1.0, 7.0, 300.0]) for number in range(dice.randint(2, 6))}
    shares = {agent: dice.choice([0.5, 1.0, 2.0, 5.0]) for agent in lengths}
    queue = FairQueue[str]()
    for agent, share in shares.items():
        queue.set_share(agent, share)
    used = run(queue, lengths, 5000.0)
    for one in lengths:
        for other in lengths:
            bound = lengths[one] / shares[one] + lengths[other] / shares[other]
            assert abs(used[one] / shares[one] - used[other] / shares[other]) <= bound + 1e-6


def test_an_idle_agent_saves_up_no_turns_beyond_a_bound() -> None:
    queue = FairQueue[str]()
    run(queue, {"busy": 10.0}, 100 * MAX_LAG_SECONDS)
    for _ in range(1000):
        queue.push("late", "round", is_round=True)
    used: Counter[str] = Counter()
    while used.total() < 200:
        popped = queue.pop()
        assert popped is not None
        agent = popped[0]
        used[agent] += 1
        queue.charge(agent, 10.0)
        if agent == "busy":
            queue.push("busy", "round", is_round=True)
    assert abs(used["late"] - used["busy"] - MAX_LAG_SECONDS / 10.0) <= 2


def test_an_agent_that_is_idle_for_a_moment_keeps_its_turn() -> None:
    queue = FairQueue[str]()
    for agent in ("slow", "quick"):
        queue.push(agent, "round", is_round=True)
    for length in (60.0, 1.0):
        popped = queue.pop()
        assert popped is not None
        queue.charge(popped[0], length)
    queue.push("slow", "round", is_round=True)
    assert queue.pop() == ("slow", "round")  # the quick one has none ready
    queue.push("quick", "round", is_round=True)
    queue.push("slow", "round", is_round=True)
    queue.charge("slow", 60.0)
    assert queue.pop() == ("quick", "round")


def test_short_operations_go_first_but_a_round_is_not_starved_by_them() -> None:
    queue = FairQueue[str]()
    queue.push("patient", "round", is_round=True)
    order: list[str] = []
    for _ in range(3 * MAX_SHORT_IN_A_ROW):
        queue.push("chatty", "score", is_round=False)
        popped = queue.pop()
        assert popped is not None
        order.append(popped[1])
        queue.charge(popped[0], 0.0)
    assert order.index("round") == MAX_SHORT_IN_A_ROW
    assert order.count("round") == 1


def test_a_save_after_a_long_round_does_not_wait_for_the_rounds_of_others() -> None:
    queue = FairQueue[str]()
    queue.push("slow", "round", is_round=True)
    assert queue.pop() == ("slow", "round")
    queue.charge("slow", 600.0)
    queue.push("other", "round", is_round=True)
    queue.push("slow", "save", is_round=False)
    assert queue.pop() == ("slow", "save")


def test_closing_and_opening_again_is_not_worth_a_turn() -> None:
    queue = FairQueue[str]()
    queue.push("greedy", "round", is_round=True)
    queue.pop()
    queue.charge("greedy", 100.0)
    queue.forget("greedy")
    queue.push("other", "first", is_round=True)
    queue.push("greedy", "second", is_round=True)
    assert queue.pop() == ("other", "first")


def test_a_removed_operation_never_runs() -> None:
    queue = FairQueue[list[int]]()
    first, second = [1], [1]
    queue.push("agent", first, is_round=True)
    queue.push("agent", second, is_round=True)
    assert queue.remove("agent", first)
    assert not queue.remove("agent", first)
    popped = queue.pop()
    assert popped is not None
    assert popped[1] is second
    assert len(queue) == 0
