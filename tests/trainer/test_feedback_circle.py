"""From an agent's answer to a verdict and a version, by nothing but thumbs: a real proxy process, an unmodified client
of OpenAI's, feedback by the ids that it got, and the trainer that judges by it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ratchet.store.states import TrajectoryState
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.whole_circle import all_shipped, proxy_before, trainer_of


@pytest.mark.slow
def test_thumbs_alone_make_a_version_and_a_late_one_names_it(tiny_model: Path, tmp_path: Path) -> None:
    with proxy_before(ScriptedVllm(), tmp_path) as proxy:
        with openai.OpenAI(base_url=proxy + "/v1", api_key="k", max_retries=0) as agent:
            question: Any = [{"role": "user", "content": "what is on friday?"}]
            liked = agent.chat.completions.create(model="agent", messages=question).id
            stream = agent.chat.completions.create(model="agent", messages=question, stream=True)
            disliked = [chunk.id for chunk in stream].pop()
        all_shipped(proxy)  # a call may take longer to reach the store than feedback waits for it
        say(proxy, response_id=liked, value="up", end_user="ann")
        feedback = say(proxy, response_id=disliked, value="down", comment="no", end_user="bob")
        by_thumbs: dict[str, Any] = {
            "judge": {"kind": "feedback"},
            "seal_after_idle_seconds": 0.2,
            "num_generations": 2,
        }
        with trainer_of(tmp_path, tiny_model, **by_thumbs) as (controller, store, engine):
            eventually(lambda: controller.step(time.time()) and store.rounds.newest_committed("agent"))
            assert {run.state for run in store.trajectories.page()} == {TrajectoryState.TRAINED}
            eventually(lambda: controller.step(time.time()) or "agent@1" in engine.loaded)

            say(proxy, response_id=disliked, value="up", comment="I was wrong", end_user="bob")
            run = feedback["trajectory_id"]
            eventually(lambda: controller.step(time.time()) or store.groups.verdicts([run])[run].score == 1.0)
            assert store.groups.verdicts([run])[run].explanation == "[after it trained agent@1] no | I was wrong"
            (newest, *_) = httpx.get(f"{proxy}/api/feedback", params={"trajectory": run}, timeout=60).json()["data"]
            assert (newest["comment"], newest["trained"]) == ("I was wrong", ["agent@1"])
            assert len(store.rounds.page("agent")) == 1


def say(proxy: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{proxy}/api/feedback", json=body, timeout=60)
    assert answer.status_code == 201, answer.text
    feedback: dict[str, Any] = answer.json()
    return feedback
