"""Resamples on the real vLLM: its own load says when, and a further answer is one to the very same prompt ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ratchet.demo.email_search.agent import TOOLS, opening
from ratchet.store.states import ResampleState, TrajectoryState
from ratchet.store.store import open_store
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.cli.project import Project
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.trainer.test_resampling import ResamplingTrainer, runs


@pytest.mark.e2e
def test_a_call_with_tools_is_resampled_token_for_token(project: Project, tmp_path: Path) -> None:
    vllm = f"http://127.0.0.1:{project.content['vllm']['port']}"
    proxy = ProxyProcess(tmp_path, upstreams=[vllm])
    with open_store(str(tmp_path / "store.db")) as store:
        # The proxy is found through its record in the store. Calls of other tests count as load on vLLM.
        settings = TrainerSettings(
            store=str(tmp_path / "store.db"), model="agent", base_model="base", vllm=(vllm,), judge="a:b",
            checkpoints=tmp_path, seal_after_idle_seconds=0.1, group_wait_seconds=0.1,
            resample={"samples": 2, "concurrency": 2},
        )  # fmt: skip
        trainer = ResamplingTrainer(store, settings)
        try:
            eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=60).status_code == 200)
            request: Any = {"model": "agent", "messages": opening("Where is the picnic?", 6), "tools": list(TOOLS)}
            with openai.OpenAI(base_url=proxy.url + "/v1", api_key="x") as agent:
                agent.chat.completions.create(**request, temperature=1.0, max_tokens=24)
            trainer.until(lambda: store.groups.page())
            counted = httpx.get(f"{proxy.url}/metrics", timeout=60).text
        finally:
            trainer.assembly.close()
            proxy.stop()
        (group,) = store.groups.page()
        transcript = [store.trajectories.read(name) for name in group.members]
        assert {one.trajectory.state for one in transcript} == {TrajectoryState.GROUPED}
        assert sorted(one.trajectory.purpose for one in transcript) == ["live", "resample", "resample"]
        assert len({one.calls[0].prompt_ids for one in transcript}) == 1
        assert all(choice.token_ids and choice.logprobs for one in transcript for choice in one.calls[0].choices)
        assert store.resamples.counts("agent")[ResampleState.ANSWERED].count == len(runs(store)) == 2
    assert 'ratchet_calls_total{alias="agent",dialect="chat",purpose="resample",state="answered"} 2.0' in counted
