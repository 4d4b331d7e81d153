"""The decision of the invariants: an equal version is rejected once in 1,000 at most, a clear break almost always."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ratchet.trainer.adapters.vllm_api import SampledAnswer
from ratchet.trainer.release.invariants import (
    ALPHA,
    AnswerPair,
    CheckedAnswer,
    Fault,
    InvariantsResult,
    conditional_p_value,
    judge_answers,
    read_answer,
)

RELATIVE = (Fault.LONG, Fault.UNCERTAIN)  # by the other answers to the same prompt
Draw = Callable[[random.Random, float], CheckedAnswer]  # with what the prompt makes likely, 0 to 1
TOOLS = frozenset({"search"})


def answers(rng: random.Random, difficulty: float, rate: float = 0.0, fault: Fault = Fault.EMPTY) -> CheckedAnswer:
    """An answer of an agent whose faults, lengths and certainty depend on the prompt."""
    ordinary = {one for one in Fault if one not in RELATIVE and rng.random() < 0.3 * difficulty}
    faults = ordinary | ({fault} if rng.random() < rate else set())
    return CheckedAnswer(
        frozenset(faults), 1 + int(rng.lognormvariate(3 + 2 * difficulty, 0.8)), rng.gammavariate(2, 0.3)
    )


def releases(count: int, prompts: int, candidate: Draw, live: Draw, samples: int = 2) -> list[InvariantsResult]:
    rng = random.Random(prompts)
    found = []
    for _ in range(count):
        difficulties = [rng.random() for _ in range(prompts)]
        pairs = [
            AnswerPair([candidate(rng, d) for _ in range(samples)], [live(rng, d) for _ in range(samples)])
            for d in difficulties
        ]
        found.append(judge_answers(pairs))
    return found


@pytest.mark.slow
def test_an_equal_version_is_rejected_at_most_once_in_a_thousand() -> None:
    found = [one for prompts in (8, 16, 64) for one in releases(1_000, prompts, answers, answers)]
    assert sum(one.broken for one in found) <= 3
    significant = sum(shares.p_value <= ALPHA / len(Fault) for one in found for shares in one.faults)
    assert significant <= 3, "also without the least increase: that is the theorem"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one for one in Fault if one not in RELATIVE])
def test_a_clear_break_of_any_kind_is_rejected(fault: Fault) -> None:
    def broken(rng: random.Random, difficulty: float) -> CheckedAnswer:
        return answers(rng, difficulty, 0.4, fault)

    found = releases(100, 64, broken, answers)
    assert sum(one.broken for one in found) >= 95
    named = [shares.fault for one in found for shares in one.faults if shares.broken]
    assert named.count(fault) >= 95


def test_longer_and_less_likely_answers_are_breaks() -> None:
    def longer(rng: random.Random, difficulty: float) -> CheckedAnswer:
        one = answers(rng, difficulty)
        return CheckedAnswer(one.faults, 20 * (one.tokens or 0), one.uncertainty)

    def noise(rng: random.Random, difficulty: float) -> CheckedAnswer:
        one = answers(rng, difficulty)
        return CheckedAnswer(one.faults, one.tokens, 4.0 + (one.uncertainty or 0.0))

    for changed, fault in ((longer, Fault.LONG), (noise, Fault.UNCERTAIN)):
        found = releases(20, 64, changed, answers)
        assert all({shares.fault for shares in one.faults if shares.broken} == {fault} for one in found)


def test_a_small_increase_passes_however_many_prompts_show_it() -> None:
    def worse(rng: random.Random, difficulty: float) -> CheckedAnswer:
        return CheckedAnswer(frozenset({Fault.QUESTION} if rng.random() < 0.12 else ()))

    result = releases(1, 1_000, worse, lambda rng, _: CheckedAnswer())[0]
    assert not result.broken
    assert "1000 recent prompts" in result.describe()


def test_too_few_prompts_decide_nothing_and_say_so() -> None:
    broken, good = CheckedAnswer(frozenset({Fault.EMPTY})), CheckedAnswer()
    few = judge_answers([AnswerPair([broken, broken], [good, good])] * 5)
    assert (few.broken, few.decidable) == (False, False)
    assert "not decided on 5 recent prompts" in few.describe()
    enough = judge_answers([AnswerPair([broken, broken], [good, good])] * 6)
    assert enough.broken
    assert "6 recent prompts empty answers in 100%" in enough.describe()
    assert judge_answers([]).decidable is False


def test_the_p_value_is_exact() -> None:
    assert conditional_p_value([]) == 1.0
    assert conditional_p_value([(0, 0, 2, 2), (2, 2, 2, 2)]) == 1.0
    assert conditional_p_value([(1, 0, 1, 1)] * 3) == pytest.approx(1 / 8)
    assert conditional_p_value([(2, 0, 2, 2)]) == pytest.approx(1 / 6)
    assert conditional_p_value([(1, 0, 1, 1), (0, 1, 1, 1)]) == pytest.approx(3 / 4)


def call(name: str = "search", arguments: str = '{"q": "x"}') -> dict[str, object]:
    return {"content": None, "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ({"content": "It is 42."}, set()),
        ({"content": "Did you know? It is 42."}, {Fault.QUESTION}),
        ({"content": "First. What for?\nIt is 42."}, set()),
        ({"content": "Shall I search the mails for you?"}, {Fault.QUESTION}),
        ({"content": ""}, {Fault.EMPTY}),
        ({"content": "<think>what now?</think>  "}, {Fault.EMPTY}),
        ({"content": "I'm sorry, but I can't help with that."}, {Fault.REFUSAL}),
        ({"content": "I cannot access your mails."}, {Fault.REFUSAL}),
        ({"content": "They said that they cannot come."}, set()),
        (call(), set()),
        (call(arguments=""), set()),
        (call("delete"), {Fault.INVALID_TOOL_CALL}),
        (call(arguments='{"q": '), {Fault.INVALID_TOOL_CALL}),
        (call(arguments="[1]"), {Fault.INVALID_TOOL_CALL}),
        ({"content": '<tool_call>{"name": "search"'}, {Fault.INVALID_TOOL_CALL}),
        ({"content": "and so on " * 60}, {Fault.REPETITION}),
        ({"content": " ".join(f"item {n} costs {n * n % 97}" for n in range(80))}, set()),
    ],
)  # fmt: skip
def test_the_faults_of_an_answer(message: dict[str, object], faults: set[Fault]) -> None:
    sampled = SampledAnswer({"role": "assistant", **message}, "stop", 5, (-0.5, -1.5))
    found = read_answer(sampled, TOOLS)
    assert found.faults == faults
    assert (found.tokens, found.uncertainty) == (5, 1.0)


def test_of_an_answer_that_was_cut_only_length_and_repetition_count() -> None:
    cut = read_answer(SampledAnswer(call(arguments='{"q": '), "length", 1024, ()), TOOLS)
    assert (cut.faults, cut.uncertainty) == ({Fault.UNFINISHED}, None)


def test_a_question_is_an_answer_where_no_tool_is_offered() -> None:
    assert not read_answer(SampledAnswer({"content": "Which one?"}, "stop", 3, ()), frozenset()).faults
