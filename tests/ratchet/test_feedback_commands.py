"""`ratchet feedback`: said by hand, listed with what it trained, and shown with the verdicts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Verdict
from ratchet.store.store import Store, open_store
from tests.harness.cli.project import Project
from tests.harness.records import answered_trajectory, judged_group

STORE = ("--store", "said.db")


@pytest.fixture
def store(project: Project, migrated: Path) -> Iterator[Store]:
    opened = open_store(str(shutil.copy(migrated, project.folder / "said.db")))
    yield opened
    opened.close()


def test_manual_feedback_is_listed_with_the_versions_trained_on_it(project: Project, store: Store) -> None:
    group = judged_group(store, ["t1", "t2"], [1.0, 0.0])
    held = store.rounds.start("agent", 0)
    store.rounds.commit(held.id, version=1, checkpoint="/c/1", groups=[group.id], metrics={})
    words = ("--comment", "no\x1b[2J thanks", "--end-user", "ann")
    done = project.call("feedback", "add", "--call", "call_t1", "--value", "down", *words, *STORE, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["trajectory_id"], result["call_id"], result["trained"]) == ("t1", "call_t1", ["agent@1"])
    listed = project.call("feedback", "list", *STORE).stdout
    assert "     0  t1  user:ann  no" in listed
    assert "trained agent@1" in listed
    assert "\x1b" not in listed
    (row,) = json.loads(project.call("feedback", "list", "--trajectory", "t1", *STORE, "--json").stdout)
    assert (row["value"], row["trained"]) == (0.0, ["agent@1"])
    shown = project.call("judge", "show", group.id, *STORE).stdout
    assert "feedback  " in shown
    assert "trained agent@1" in shown
    assert json.loads(project.call("judge", "show", group.id, *STORE, "--json").stdout)["trained"]["t2"] == ["agent@1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--value", "up"), "trajectory_id"),
        (("--trajectory", "t1"), "give a value"),
        (("--trajectory", "t1", "--value", "great"), "--value"),
        (("--trajectory", "nobody", "--value", "1"), "nobody"),
    ],
)
def test_invalid_arguments_are_refused(project: Project, store: Store, words: tuple[str, ...], message: str) -> None:
    done = project.call("feedback", "add", *words, *STORE)
    assert done.returncode != 0
    assert message in done.stdout


def test_preferences_are_exported_in_every_form(project: Project, store: Store) -> None:
    for name, answer in (("t1", "Oslo"), ("t2", "Rome")):
        answered_trajectory(store, name, answer)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["t1", "t2"], now=101.0)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score)
        for name, score in (("t1", 1.0), ("t2", 0.0))
    ]
    store.groups.record_verdicts(group.id, verdicts)
    words = ("--value", "up", "--demonstration", "Bergen")
    assert project.call("feedback", "add", "--trajectory", "t1", *words, *STORE).returncode == 0
    wanted: dict[str, dict[str, Any]] = {
        "unpaired": {"completion": "Oslo", "label": True},
        "paired": {"chosen": "Oslo", "rejected": "Rome"},
        "demonstrations": {"completion": "Bergen"},
    }
    for form, fields in wanted.items():
        done = project.call("feedback", "export", "--format", form, "--out", "rows.jsonl", "--model", "agent", *STORE)
        assert done.stdout.strip() == "rows.jsonl: 1 rows"
        row = json.loads((project.folder / "rows.jsonl").read_text())
        texts = {name: value[0]["content"] if isinstance(value, list) else value for name, value in row.items()}
        assert {name: texts[name] for name in fields} == fields
