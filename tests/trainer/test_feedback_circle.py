"""From an agent's answer to a verdict and a version, by nothing but thumbs: a real proxy process, an unmodified client
of OpenAI's, feedback by the ids that it got, and the trainer that judges by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from store import open_store
from store.states import TrajectoryState
from tests.proxy.scripted_vllm import ScriptedVllm
from tests.proxy.servers import ProxyProcess, eventually, served
from tests.trainer.scripted_engine import ScriptedEngine
from trainer.daemon import Daemon
from trainer.learning.learner import LearnerSettings
from trainer.settings import TrainerSettings


def test_thumbs_alone_make_a_version_and_a_late_one_names_it(tiny_model: Path, tmp_path: Path) -> None:
    with served(ScriptedVllm()) as vllm:
        process = ProxyProcess(tmp_path, upstreams=[vllm])
        try:
            eventually(lambda: httpx.get(process.url + "/health/ready", timeout=5).status_code == 200)
            circle(process.url, tiny_model, tmp_path)
        finally:
            process.stop()


def circle(proxy: str, tiny_model: Path, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=proxy + "/v1", api_key="k", max_retries=0) as agent:
        question: Any = [{"role": "user", "content": "what is on friday?"}]
        liked = agent.chat.completions.create(model="agent", messages=question).id
        stream = agent.chat.completions.create(model="agent", messages=question, stream=True)
        disliked = [chunk.id for chunk in stream].pop()
    # On a busy machine a call may take longer to reach the store than feedback waits for it.
    eventually(lambda: httpx.get(f"{proxy}/health/backlog", timeout=10).json()["unshipped_records"] == 0, 30)
    say(proxy, response_id=liked, value="up", end_user="ann")
    told = say(proxy, response_id=disliked, value="down", comment="no", end_user="bob")
    store, engine = open_store(str(tmp_path / "store.db")), ScriptedEngine(lambda name, ids: 0.0)
    settings = TrainerSettings(
        store=str(tmp_path / "store.db"),
        model="agent",
        base_model=str(tiny_model),
        vllm=(engine.url,),
        checkpoints=tmp_path / "checkpoints",
        judge={"kind": "feedback"},
        seal_after_idle_seconds=0.2,
        group_size=2,
        groups_per_round=1,
        # The scripted vLLM's logprobs are not this model's: its rows would rightly be rejected.
        learner=LearnerSettings(learning_rate=1e-2, reject_ratio_beyond=None),
    )
    daemon = Daemon(settings, store, threading.Event())

    def served_logprob(name: str, ids: Sequence[int]) -> float:
        return daemon.learner.score([ids], adapter=name == "agent@1")[0][-1]

    engine.scorer = served_logprob
    try:
        eventually(lambda: daemon.turn(time.time()) and store.rounds.newest_committed("agent"), 30)
        assert {run.state for run in store.trajectories.page()} == {TrajectoryState.TRAINED}
        eventually(lambda: daemon.turn(time.time()) or "agent@1" in engine.loaded, 10)

        say(proxy, response_id=disliked, value="up", comment="I was wrong", end_user="bob")
        run = told["trajectory_id"]
        eventually(lambda: daemon.turn(time.time()) or store.groups.verdicts([run])[run].score == 1.0, 10)
        assert store.groups.verdicts([run])[run].explanation == "[after it trained agent@1] no | I was wrong"
        (newest, *_) = httpx.get(f"{proxy}/api/feedback", params={"trajectory": run}, timeout=10).json()["data"]
        assert (newest["comment"], newest["trained"]) == ("I was wrong", ["agent@1"])
        assert len(store.rounds.page("agent")) == 1
    finally:
        daemon.close()
        engine.close()
        store.close()


def say(proxy: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{proxy}/api/feedback", json=body, timeout=10)
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told
