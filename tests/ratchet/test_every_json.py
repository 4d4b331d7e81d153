"""Every command with --json prints JSON and nothing else to its standard output; a new one has to be listed here.

Commands that read are run on a filled store. Those that need a running engine are run with --json by the test that is
named beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from ratchet.cli import cli, run
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Feedback
from ratchet.store.store import open_store
from tests import house
from tests.harness.records import judged_group
from tests.ratchet.test_tune_prompt import ended

HERE = Path(__file__).parent

# What is run here: command -> its arguments; GROUP is a judged group of a and b, RUN a tuning that found a better
# prompt.
READS: dict[str, tuple[str, ...]] = {
    "audit": (),
    "doctor": (),
    "down": (),
    "feedback add": ("--trajectory", "a", "--value", "1", "--end-user", "ann"),
    "feedback export": ("--format", "unpaired", "--out", "thumbs.jsonl"),
    "feedback list": (),
    "groups list": (),
    "groups show": ("GROUP",),
    "judge calibrate": ("--judge", "judges.py:mine", "--truth", "judges.py:mine"),
    "judge lint": ("--judge", "judges.py:mine", "--answer", "Oslo", "--wrong", "Rome"),
    "judge rescore": ("--judge", "judges.py:mine"),
    "judge show": ("GROUP",),
    "judge try": ("a", "b", "--judge", "judges.py:mine"),
    "keys list": (),
    "policies list": (),
    "policies show": ("agent", "0"),
    "status": (),
    "store delete": ("a", "--dry-run"),
    "store prune": ("--older-than", "1d", "--dry-run"),
    "store verify": (),
    "tasks import": ("tasks.jsonl", "--name", "sums"),
    "tasks list": (),
    "trajectories list": (),
    "trajectories show": ("a",),
    "tune promote": ("RUN",),
    "tune report": (),
    "tune runs": (),
    "usage": (),
}

# What needs an engine: command -> the file of tests that runs it with --json, and words that stand in it.
ELSEWHERE = {
    "plan": ("test_plan_command.py", '"plan"'),
    "reload": ("test_agents_watch.py", '"reload"'),
    "tune prompt": ("test_tune_prompt.py", '"prompt"'),
    "tune select-model": ("test_tune_select.py", '"select-model"'),
    "tune weights": ("test_tune_weights.py", '"weights"'),
    "up": ("test_up.py", '"--detach"'),
}


EVERY = {
    " ".join(path)
    for path, command in house.commands(cli)
    if not isinstance(command, click.Group) and any("--json" in one.opts for one in command.params)
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a store that holds one of everything that is listed; and the ids that READS names."""
    folder = tmp_path_factory.mktemp("filled")
    (folder / "judges.py").write_text("def mine(trajectory):\n    return float(trajectory['id'] in ('a', 'lint-0'))\n")
    (folder / "tasks.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    with open_store(str(folder / "store.db")) as store:
        group = judged_group(store, ["a", "b"], [0.0, 1.0])
        store.policies.register_base("agent", "agent@0")
        fields: dict[str, Any] = {
            "kind": "trajectory",
            "target": "a",
            "source": "ann",
            "given_at": 5.0,
            "trusted": True,
        }
        store.feedback.add([Feedback(id="fb_1", value=1.0, **fields)])
        found = ended(store, "better")
        tuning = store.tunings.begin("eval", "agent", {})
        rollout = Rollout(
            id="r", tuning_id=tuning.id, task_id="t", split="test", attempt=0, candidate="agent@0", planned_at=1.0
        )
        store.rollouts.plan([rollout])
    return folder, {"GROUP": group.id, "RUN": found}


def test_every_command_that_prints_json_is_run_by_a_test() -> None:
    assert READS.keys() | ELSEWHERE.keys() == EVERY
    for command, (file, words) in ELSEWHERE.items():
        text = (HERE / file).read_text()
        assert words in text, command


@pytest.mark.parametrize("command", sorted(READS))
def test_a_command_prints_json_and_nothing_else(
    filled: tuple[Path, dict[str, str]],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, ids = filled
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RATCHET_STORE", str(folder / "store.db"))
    monkeypatch.setenv("RATCHET_MODEL", "agent")
    code = run([*command.split(), *(ids.get(word, word) for word in READS[command]), "--json"])
    stdout, stderr = capfd.readouterr()
    assert code in (0, 1, 3), stderr
    json.loads(stdout)
