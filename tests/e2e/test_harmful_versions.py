"""Guarded releases on the real vLLM: a harmful version is rolled back from its ramp, an equal one becomes live."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.production.harmful import altered_copy
from ratchet.demo.traffic import TaskRollout
from ratchet.store.records import Decision
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import open_store
from tests.e2e.test_mixed_batches import POLICY
from tests.harness.cli.project import ROOT, Project, wait_for
from tests.harness.releases.mail_traffic import MailTraffic

AGENT = "mail"
HARMFUL, EQUAL = 0.3, 0.001  # noise on the weights
RAMP = 48  # scored trajectories: about a minute of this traffic
SECONDS = 900.0  # for a start or a decision, on a busy machine
JUDGE = (
    "from ratchet.demo.email_search.tasks import final_answer\n\n\n"
    "def judge(trajectory):\n    return float(final_answer(trajectory['messages']) is not None)\n"
)
TRAINER = {
    "judge": "answered:judge",
    "groups_per_round": 1000,  # no round: the only versions are those that are handed in
    "round_wait_seconds": 1e6,
    "seal_after_idle_seconds": 1.5,
    "group_wait_seconds": 5,
    "poll_interval_seconds": 0.2,
    # Invariants would reject the harmful version before it serves (test_invariants.py): here the ramp has to find it.
    "release": {"ramp": RAMP, "invariant_prompts": 0},
}


def new_adapter(folder: Path) -> Path:
    """An adapter as a new learner has it: it changes nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), config).save_pretrained(folder)
    return folder


def answered(rollouts: Sequence[TaskRollout]) -> float:
    """The share of rollouts that ended with an answer."""
    return sum(one.end == "answer" for one in rollouts) / len(rollouts)


@dataclass
class Stream:
    """A project with traffic, and the adapters that are handed in."""

    project: Project
    traffic: MailTraffic
    folder: Path

    def hand_in(self, noise: float) -> int:
        """Hand in an adapter with so much noise; return its version."""
        copy = altered_copy(self.folder / "new", self.folder / f"noise-{noise}", noise=noise)
        done = self.project.run("policies", "import", str(copy), AGENT)
        assert done.returncode == 0, done.stdout
        return int(done.stdout.split("@")[1].split()[0])

    def decided(self, version: int) -> PolicyState:
        """Wait until a version is live or rejected; return which."""
        wait_for(f"a decision on {version}", lambda: self._state(version) in (PolicyState.LIVE, PolicyState.REJECTED),
                 SECONDS, pause=0.5)  # fmt: skip
        return self._state(version)

    def decisions(self, version: int) -> list[Decision]:
        with open_store(str(self.project.state / "store.db")) as store:
            return store.decisions.decisions_of(AGENT, version)

    def _state(self, version: int) -> PolicyState:
        with open_store(str(self.project.state / "store.db")) as store:
            return store.policies.get(AGENT, version).state


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """`ratchet up` with the tiny policy, and agents that call it without a break."""
    home = tmp_path / "mail"
    build = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--home", str(home)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    project = Project(tmp_path)
    (tmp_path / "answered.py").write_text(JUDGE)
    vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32"}
    project.write(base_model=str(POLICY), vllm=vllm, model=AGENT, trainer=TRAINER, learner={"threads": 1})
    new_adapter(tmp_path / "new")
    try:
        up = project.run("up", "--detach", seconds=SECONDS)
        assert up.returncode == 0, up.stdout
        url = f"http://127.0.0.1:{project.content['proxy']['port']}/v1"
        with MailTraffic(url, home, AGENT, timeout=600.0) as traffic:
            wait_for("traffic for the proof", lambda: len(traffic.rollouts) >= 24, SECONDS)
            yield Stream(project, traffic, tmp_path)
        assert project.run("down").returncode == 0
    finally:
        project.stop()


@pytest.mark.e2e
def test_a_harmful_version_is_rolled_back_from_its_ramp_and_an_equal_one_becomes_live(stream: Stream) -> None:
    harmful = stream.hand_in(HARMFUL)
    assert stream.decided(harmful) is PolicyState.REJECTED
    rollback, *earlier = stream.decisions(harmful)
    assert (rollback.action, rollback.decided_by) == (PolicyAction.ROLLBACK, "release")
    assert rollback.evidence["harm"][str(harmful)] >= 1000
    assert PolicyAction.RAMP in {one.action for one in earlier}, "it served"
    bad, good = (stream.traffic.served_by(f"{AGENT}@{number}") for number in (harmful, 0))
    assert answered(bad) < answered(good) - 0.3
    assert len(bad) <= 200

    equal = stream.hand_in(EQUAL)
    assert stream.decided(equal) is PolicyState.LIVE
    assert stream.decisions(equal)[0].decided_by == "release"
    assert stream.traffic.failed == []
