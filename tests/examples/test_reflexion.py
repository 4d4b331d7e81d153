"""The Reflexion wrapper: a refused answer is reflected on and tried again, all in one trajectory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples.reflexion import workflow
from ratchet.trainer.rows.build_rows import build_rows
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, says, text_of

Play = Callable[[Callable[[Messages], Script]], Proxy]
TASK = {"question": "What is 6 times 7?"}


def learner(messages: Messages) -> Script:
    """Answers in words until a lesson asks for digits."""
    prompt = text_of(messages[-1])
    if "say what to do differently" in prompt:
        return says("answer in digits")
    return says("42") if "Lesson: answer in digits" in prompt else says("forty-two")


@pytest.mark.slow
async def test_a_refused_answer_is_reflected_on_and_tried_again_in_one_trajectory(play: Play) -> None:
    proxy = play(learner)
    given: Any = {"base_url": f"{proxy.url}/t/roll_1/v1", "api_key": "x", "model": "agent"}
    output = await workflow(TASK, **given)
    assert output.response == "42"
    assert output.metrics == {"attempts": 2.0, "refused": 0.0}
    proxy.settled()
    calls = proxy.store.trajectories.read("roll_1").calls
    assert len(calls) == 3, "attempt, reflection, attempt"
    rows = build_rows("roll_1", calls, 1.0)
    assert sum(sum(row.mask) for row in rows.rows) == sum(call.completion_tokens for call in calls)
    assert not rows.untrained


@pytest.mark.slow
async def test_the_attempts_are_limited_and_the_last_answer_counts(play: Play) -> None:
    proxy = play(lambda _: says("never a number"))
    output = await workflow(TASK, base_url=f"{proxy.url}/t/roll_1/v1", api_key="x", model="agent")
    assert output.response == "never a number"
    assert output.metrics == {"attempts": 3.0, "refused": 1.0}
