"""One round on the real vLLM: an agent's calls become a trained version, which answers its next calls."""

from __future__ import annotations

import itertools
from typing import Any

import openai

from ratchet.demo.email_search.agent import opening
from ratchet.store.states import SERVING, PolicyState, RoundState
from ratchet.store.store import Store, open_store
from tests.harness.cli.project import ROOT, Project, is_alive, wait_for

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
_TRAINER = {
    "num_generations": 4, "groups_per_round": 2, "seal_after_idle_seconds": 0.3,
    "group_wait_seconds": 60, "round_wait_seconds": 1, "poll_interval_seconds": 0.1,
}  # fmt: skip
_SERVED = (*SERVING, PolicyState.RETIRED)
_LEARNER = {"lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-3, "threads": 1}


def train_one_round(project: Project, judge: str) -> None:
    """Serve the tiny policy, make calls until a version trained from them answers, stop, and check the round."""
    vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32"}
    project.write(
        base_model=str(POLICY), vllm=vllm, model="mail", trainer={"judge": judge} | _TRAINER, learner=_LEARNER
    )
    try:
        up = project.run("up", "--detach", seconds=240)
        assert up.returncode == 0, up.stdout
        pids = [int(file.read_text().split()[0]) for file in (project.state / "run").glob("*.pid")]
        url = f"http://127.0.0.1:{project.content['proxy']['port']}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as agent:
            attempts = itertools.count()
            first = {_call(agent, f"task {number % 2}", next(attempts)) for number in range(8)}
            assert first == {"mail@0"}
            with open_store(str(project.state / "store.db")) as store:
                wait_for("version 1 serves", lambda: _states(store).get(1) in _SERVED, seconds=180)
            # Version 1 gets a share of the new trajectories; the proxy reads the shares from the store.
            wait_for("version 1 answers", lambda: _call(agent, "later", next(attempts)) == "mail@1", pause=0.5)
        assert project.run("down").returncode == 0
        assert not [pid for pid in pids if is_alive(pid)]
    except Exception:
        for log in sorted((project.state / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        raise
    finally:
        project.stop()
    with open_store(str(project.state / "store.db")) as store:
        round_ = store.rounds.page("mail", 10)[-1]  # a later one may follow on a slow machine
        assert round_.state is RoundState.COMMITTED
        assert round_.metrics["tokens_trained"] > 50
        assert round_.metrics["logprob_abs_diff_mean"] < 0.2, "vLLM and the trainer compute different logprobs"
        assert _states(store)[1] in _SERVED


def _states(store: Store) -> dict[int, PolicyState]:
    return {policy.version: policy.state for policy in store.policies.all("mail")}


def _call(agent: openai.OpenAI, task: str, attempt: int) -> str:
    """Make a call as one trajectory of the task; return the version that answered."""
    messages: Any = opening(f"Where is the picnic of {task}?", 6)
    answer = agent.chat.completions.create(
        model="mail", messages=messages, max_tokens=24, temperature=1.0,
        extra_headers={"x-ratchet-task": task, "x-ratchet-trajectory": f"{task} {attempt}".replace(" ", "-")},
    )  # fmt: skip
    return answer.model
