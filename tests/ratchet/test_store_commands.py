"""The commands of the store as a user runs them: pruning, deletion, trajectories, feedback, audit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.cli import run
from ratchet.options import current_user
from ratchet.store.operation_records import AuditEntry
from ratchet.store.records import Verdict, VersionDraw
from ratchet.store.store import Store, open_store
from tests.harness.cli.project import Project
from tests.harness.records import (
    QUESTION,
    answered_trajectory,
    call_start,
    commit_round,
    ended,
    judged_group,
    tool_call,
)


@pytest.fixture
def url(project: Project) -> str:
    """A store with two old trajectories that a round trained, an old and a new one that it did not."""
    file = str(project.folder / "filled.db")
    store = open_store(file)
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1, checkpoint="/c/0001", groups=[group.id])
    answered_trajectory(store, "old", key_id="key_1")
    answered_trajectory(store, "new", "another answer", at=time.time(), tags=("person",))
    store.close()
    return file


def _left(url: str) -> set[str]:
    store = open_store(url)
    names = {run.id for run in store.trajectories.page()}
    store.close()
    return names


@pytest.mark.slow
def test_pruning_by_age_can_be_tried_and_keep_what_was_trained(project: Project, url: str) -> None:
    tried = project.call("store", "prune", "--older-than", "30d", "--dry-run", "--store", url)
    assert "3 trajectories would be deleted" in tried.stdout
    assert "agent@1" in tried.stdout
    assert len(_left(url)) == 4
    kept = project.call("store", "prune", "--older-than", "30d", "--keep-trained", "--store", url)
    assert "1 trajectories deleted" in kept.stdout
    assert "no policy was trained" in kept.stdout
    assert _left(url) == {"a", "b", "new"}
    done = project.call("store", "prune", "--older-than", "4w", "--json", "--store", url)
    (deletion,) = json.loads(done.stdout)
    assert (deletion["trajectory_count"], deletion["policies"][0]["adapter"]) == (2, "/c/0001")
    assert _left(url) == {"new"}


@pytest.mark.slow
def test_forgetting_asks_first_and_takes_what_is_named(project: Project, url: str) -> None:
    assert project.run("store", "delete", "--store", url).returncode == 2
    assert project.run("store", "delete", "a", "--store", url).returncode == 130  # nobody there to say yes
    assert len(_left(url)) == 4
    done = project.run("store", "delete", "a", "nothing", "--yes", "--store", url)
    assert (done.returncode, "no trajectory nothing" in done.stdout) == (1, True)
    assert "1 trajectories deleted" in done.stdout
    assert "agent@1  candidate  trained on them  /c/0001" in done.stdout
    assert project.call("store", "delete", "--key", "key_1", "--yes", "--store", url).returncode == 0
    unknown = project.call("store", "delete", "--key", "nokey", "--yes", "--store", url)
    assert (unknown.returncode, "no key nokey in this store" in unknown.stdout) == (1, True)
    unused = project.call("keys", "create", "--name", "unused", "--store", url).stdout.split("key_")[1].split(":")[0]
    assert project.call("store", "delete", "--key", f"key_{unused}", "--yes", "--store", url).returncode == 0
    assert project.call("store", "delete", "--tag", "person", "--before", "2001-01-01", "--yes", "--store", url).stdout
    assert _left(url) == {"b", "new"}
    assert project.call("store", "delete", "--before", "2001-01-01", "--yes", "--store", url).returncode == 0
    assert _left(url) == {"new"}


@pytest.mark.slow
def test_versions_that_learnt_what_is_deleted_are_marked_and_can_be_rejected(project: Project, url: str) -> None:
    store = open_store(url)
    store.policies.promote("agent", 1, {})
    store.close()
    assert project.call("store", "delete", "a", "--yes", "--store", url).returncode == 0
    listed = project.call("policies", "list", "--store", url).stdout.splitlines()
    assert [line.endswith("(trained on deleted trajectories)") for line in listed if "@" in line[:10]] == [False, True]
    done = project.call("store", "delete", "b", "--reject-policies", "--yes", "--store", url)
    assert "rejected: agent@1; agent@0 is live" in done.stdout
    plain = json.loads(project.call("policies", "list", "--json", "--store", url).stdout)
    assert [(one["state"], one["trained_on_deleted"]) for one in plain] == [("live", False), ("rejected", True)]


@pytest.mark.parametrize("words", [("--older-than", "soon"), ("--older-than", "30")])
def test_an_invalid_age_is_reported(project: Project, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = project.call("store", "prune", *words, "--store", str(tmp_path / "x.db"))
    assert done.returncode == 2
    assert "write 30d" in done.stdout


@pytest.fixture
def filled_url(project: Project) -> str:
    """A store with a judged group of two, and a trajectory with a tool call and a hostile answer."""
    file = str(project.folder / "filled.db")
    store = open_store(file)
    judged_group(store, ["a", "b"], [0.0, 1.0])
    first = call_start("call_1", "talk", QUESTION, at=5000.0, draw=VersionDraw(shares={0: 0.1, 1: 0.9}))
    later = [*QUESTION, tool_call(), {"role": "tool", "content": "found", "tool_call_id": "c1"}]
    second = call_start("call_2", "talk", later, at=5001.0, parent_call="call_1", linked_by="graph")
    hostile = {"role": "assistant", "content": "Oslo\x1b]0;owned\x07 [red]not markup[/red]"}
    store.calls.ship(
        [
            ended(first, tool_call(), messages=QUESTION, prompt=(1, 2, 3), ids=(4, 5)),
            ended(second, hostile, messages=later, prompt=(6,), ids=(7, 8, 9), context="exact"),
        ]
    )
    store.close()
    return file


@pytest.mark.slow
def test_trajectories_are_listed_newest_first_with_their_scores_page_by_page(project: Project, filled_url: str) -> None:
    found = json.loads(project.call("trajectories", "list", "--store", filled_url, "--json").stdout)
    assert found[0]["id"] == "talk"
    assert found[0]["draw"] == {"shares": {"0": 0.1, "1": 0.9}, "unit": None, "counted": True}
    assert {one["id"]: one["score"] for one in found} == {"talk": None, "a": 0.0, "b": 1.0}
    page = project.call("trajectories", "list", "--store", filled_url, "--limit", "1").stdout
    assert "next page: --before talk" in page
    assert "talk" not in project.call("trajectories", "list", "--store", filled_url, "--before", "talk").stdout


@pytest.mark.slow
def test_the_filter_is_that_of_the_export(project: Project, filled_url: str) -> None:
    open_ones = json.loads(
        project.call("trajectories", "list", "--store", filled_url, "--state", "open", "--json").stdout
    )
    assert [one["id"] for one in open_ones] == ["talk"]
    assert (
        "no trajectory matches" in project.call("trajectories", "list", "--store", filled_url, "--task", "none").stdout
    )


def test_one_is_shown_with_messages_calls_and_tool_calls_and_steers_no_terminal(
    project: Project, filled_url: str
) -> None:
    shown = project.call("trajectories", "show", "talk", "--store", filled_url).stdout
    assert "linked by graph, context exact" in shown
    assert '-> search({"a": 1})' in shown
    assert "[red]not markup[/red]" in shown
    assert "\x1b" not in shown
    scored = project.call("trajectories", "show", "b", "--store", filled_url).stdout
    assert "score    1 by" in scored


@pytest.mark.slow
def test_as_json_it_is_what_the_export_writes(project: Project, filled_url: str) -> None:
    record = json.loads(project.call("trajectories", "show", "talk", "--store", filled_url, "--json").stdout)
    assert [row["input_ids"] for row in record["rows"]] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert project.call("trajectories", "show", "nobody", "--store", filled_url).returncode == 1


def test_keys_and_deletions_by_command_and_requests_are_listed(
    store_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(store_file))
    answered_trajectory(store, "job")
    seen: Any = {
        "at": 1e9,
        "last_at": 1e9 + 5,
        "count": 3,
        "actor": "ann\x1b[31m",
        "key_id": "key_1",
        "client": "10.0.0.7",
    }
    store.audit.record([AuditEntry(**seen, id="audit_00", method="GET", route="/calls", target={"alias": "mail"})])
    at = ("--store", str(store_file))
    assert run(["keys", "create", "--name", "crawler", *at]) == 0
    key = capsys.readouterr().out.strip()
    (made,) = store.keys.all()
    assert run(["keys", "update", made.id, "--requests-per-minute", "5", *at]) == 0
    assert run(["keys", "revoke", made.id, *at]) == 0
    assert run(["store", "delete", "job", "--yes", *at]) == 0
    store.close()
    capsys.readouterr()
    assert run(["audit", *at]) == 0
    shown = capsys.readouterr().out
    last, revoked, updated, created, read = shown.splitlines()
    assert last.endswith(f"{current_user()}  CLI  store delete  reason=delete: 1 by id trajectories=1  done")
    assert revoked.endswith(f"CLI  keys revoke  key={made.id} name=crawler  done")
    assert updated.endswith(f"CLI  keys update  key={made.id} name=crawler changed=requests_per_minute  done")
    assert "CLI  keys create" in created
    assert read == (
        "2001-09-09 01:46:40  ann\N{REPLACEMENT CHARACTER}[31m (key_1)  10.0.0.7  GET  /calls  alias=mail  "
        "outcome unknown  3 times"
    )
    assert key not in shown
    assert run(["audit", "--changes", "--json", *at]) == 0
    assert [one["route"] for one in json.loads(capsys.readouterr().out)] == [
        "store delete", "keys revoke", "keys update", "keys create"
    ]  # fmt: skip


STORE = ("--store", "said.db")


@pytest.fixture
def store(project: Project, migrated: Path) -> Iterator[Store]:
    opened = open_store(str(shutil.copy(migrated, project.folder / "said.db")))
    yield opened
    opened.close()


def test_manual_feedback_is_listed_with_the_versions_trained_on_it(project: Project, store: Store) -> None:
    group = judged_group(store, ["t1", "t2"], [1.0, 0.0])
    commit_round(store, "agent", 1, groups=[group.id])
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
