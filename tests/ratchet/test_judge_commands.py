"""`ratchet judge`: tries, shows, lints and compares, and records no verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.operation_records import Rollout
from ratchet.store.records import Group, Verdict
from ratchet.store.store import Store, open_store
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.cli.project import Project
from tests.harness.records import answered_trajectory, end_rollout

CAREFUL = "def judge(response):\n    return float(response.strip() == 'Oslo')\n"
FOOLED = "def judge(response):\n    return float('Oslo' in response)\n"


@pytest.fixture
def store(project: Project, migrated: Path) -> Iterator[Store]:
    (project.folder / "careful.py").write_text(CAREFUL)
    (project.folder / "fooled.py").write_text(FOOLED)
    opened = open_store(str(shutil.copy(migrated, project.folder / "judged.db")))
    yield opened
    opened.close()


def grouped(store: Store) -> Group:
    for name, answer in (("t1", "Oslo"), ("t2", "not Oslo")):
        answered_trajectory(store, name, answer)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    return store.groups.create("k", "agent", ["t1", "t2"], now=101.0)


@pytest.mark.slow
def test_try_judges_stored_trajectories_and_records_nothing(project: Project, store: Store) -> None:
    group = grouped(store)
    done = project.run("judge", "try", "t1", "t2", "--judge", "careful:judge", "--store", "judged.db", "--json")
    assert done.returncode == 0, done.stdout
    assert [verdict["score"] for verdict in json.loads(done.stdout)["verdicts"]] == [1.0, 0.0]
    assert store.groups.verdict_history(group.id) == []


@pytest.mark.slow
def test_try_judges_one_response_without_a_store(project: Project) -> None:
    (project.folder / "rule.py").write_text(
        "def judge(task, response):\n"
        "    right = float(task['answer'] in response)\n"
        "    return {'score': right, 'components': {'right': right}, 'explanation': 'wants ' + task['answer']}\n"
    )
    words = ("judge", "try", "--judge", "rule:judge", "--task", '{"answer": "Oslo"}')
    done = project.run(*words, "--response", "It is Oslo.", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        0,
        {"score": 1.0, "components": {"right": 1.0}, "explanation": "wants Oslo"},
    ), done.stdout
    assert project.run(*words, "--response", "Rome").stdout == "0  right=0  wants Oslo\n"
    keyed = project.run("judge", "try", "--judge", "rule:judge", "--task", "capital", "--response", "Oslo")
    assert keyed.returncode == 1
    assert "judge rule:judge: TypeError" in keyed.stdout
    for refused in (words, (*words, "--response", "Oslo", "t1"), ("judge", "try", "--judge", "rule:judge")):
        assert project.run(*refused).returncode == 2
    assert not list(project.folder.rglob("*.db"))


@pytest.mark.slow
def test_lint_finds_a_judge_that_looks_for_the_answer_anywhere(project: Project, store: Store) -> None:
    words = ("--answer", "Oslo", "--wrong", "Rome")
    assert project.run("judge", "lint", "--judge", "careful:judge", *words).returncode == 0
    fooled = project.run("judge", "lint", "--judge", "fooled:judge", *words)
    assert fooled.returncode == 1
    assert "FOOLED        1  every candidate" in fooled.stdout
    assert "FOOLED        1  denied: 'It is certainly not Oslo.'" in fooled.stdout


@pytest.mark.slow
def test_rescore_shows_what_another_judge_would_change(project: Project, store: Store) -> None:
    group = grouped(store)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="careful:judge", judge_version="1", score=score)
        for name, score in (("t1", 1.0), ("t2", 0.0))
    ]
    store.groups.record_verdicts(group.id, verdicts)
    done = project.run("judge", "rescore", "--judge", "fooled:judge", "--store", "judged.db", "--json")
    result = json.loads(done.stdout)
    assert (result["mean_before"], result["mean_after"], result["moved"][0]) == (0.5, 1.0, ["t2", 0.0, 1.0])
    (project.folder / "broken.py").write_text("def judge(response):\n    raise ValueError('no table')\n")
    failed = project.run("judge", "rescore", "--judge", "broken:judge", "--store", "judged.db")
    assert failed.returncode == 1
    assert "0 trajectories of 1 groups, 2 failures\ncommonest failure, 2 of 2: ValueError: no table" in failed.stdout
    assert "mean" not in failed.stdout


@pytest.mark.slow
def test_show_prints_judge_requests_without_control_characters(project: Project, store: Store) -> None:
    group = grouped(store)
    with ScriptedModel() as model:
        model.answers = [
            says({"scores": [{"trajectory_id": n, "explanation": "x\x1b[2J", "score": 0.5} for n in ("1", "2")]})
        ]
        spec = {"kind": "ruler", "base_url": model.url, "model": "big"}
        (project.folder / "ruler.json").write_text(json.dumps(spec))
        done = project.run("judge", "try", "t1", "t2", "--judge", "ruler.json", "--store", "judged.db")
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    from ratchet.trainer.judges.make_judge import make_judge
    from ratchet.trainer.settings.judge_specs import read_spec

    with ScriptedModel() as model:
        model.answers = [
            says({"scores": [{"trajectory_id": n, "explanation": "so", "score": 0.5} for n in ("1", "2")]})
        ]
        judge = make_judge(read_spec(spec | {"base_url": model.url}), {})
        judgement = judge.judge(group.id, [store.trajectories.read(name) for name in group.members])
        judge.close()
    store.groups.record_verdicts(group.id, judgement.verdicts, judgement.judge_requests)
    shown = project.run("judge", "show", group.id, "--store", "judged.db")
    assert shown.returncode == 0, shown.stdout
    assert "You compare several attempts" in shown.stdout
    assert "[answer]" in shown.stdout


@pytest.mark.slow
def test_a_groups_members_keep_version_scenario_step_and_exception_through_judging(
    project: Project, store: Store
) -> None:
    tuning = store.tunings.begin("weights", "agent", {})
    planned: dict[str, Any] = {
        "tuning_id": tuning.id,
        "task_id": "k",
        "split": "train",
        "candidate": "live",
        "planned_at": 1.0,
    }
    for attempt, name in enumerate(("t1", "t2")):
        scenario = {"mailbox": f"box {attempt}"}
        store.rollouts.plan([Rollout(id=name, attempt=attempt, scenario=scenario, step=7, **planned)])
    end_rollout(store, "t1", started_at=1.0, ended_at=2.0)
    end_rollout(store, "t2", failure="TimeoutError: 60 s are over")
    group = grouped(store)
    judge: dict[str, Any] = {"group_id": group.id, "judge": "j", "judge_version": "1"}
    store.groups.record_verdicts(
        group.id, [Verdict(trajectory_id=name, score=score, **judge) for name, score in (("t1", 1.0), ("t2", 0.0))]
    )
    shown = project.run("judge", "show", group.id, "--store", "judged.db").stdout
    assert "member  t1  agent@0  attempt 0  step 7  live  mailbox=box 0\n" in shown
    assert "mailbox=box 1  FAILED: TimeoutError: 60 s are over\n" in shown
    result = json.loads(project.run("judge", "show", group.id, "--store", "judged.db", "--json").stdout)
    assert [(one["id"], one["state"], one["step"]) for one in result["rollouts"]] == [
        ("t1", "ended", 7),
        ("t2", "failed", 7),
    ]


@pytest.mark.slow
def test_calibrate_holds_a_judge_against_the_truth_in_both_orders(project: Project, store: Store) -> None:
    grouped(store)
    against = ("--truth", "careful:judge", "--store", "judged.db")
    good = project.run("judge", "calibrate", "--judge", "careful:judge", *against, "--json")
    assert good.returncode == 0, good.stdout
    result = json.loads(good.stdout)
    assert (result["truth"], result["agreement"], result["pairs"], result["swapped"]) == ("careful:judge", 1.0, 1, 0.0)
    bad = project.run("judge", "calibrate", "--judge", "fooled:judge", *against)
    assert bad.returncode == 1
    assert "agreement 50.0% of 1 pairs" in bad.stdout
    nothing = project.run("judge", "calibrate", "--judge", "careful:judge", "--truth", "fooled:judge", *against[2:])
    assert nothing.returncode == 1
    assert "nothing to compare the judge with" in nothing.stdout


@pytest.mark.slow
def test_calibrate_measures_and_records_the_noise_of_a_judge_without_a_truth(project: Project, store: Store) -> None:
    grouped(store)
    (project.folder / "moody.py").write_text(
        "calls = 0\n\n\ndef judge(response):\n    global calls\n    calls += 1\n    return 0.1 * (calls % 3)\n"
    )
    done = project.run("judge", "calibrate", "--judge", "moody:judge", "--store", "judged.db", "--json")
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout)
    assert result["noise"] > 0.05
    recorded = store.observations.latest("agent", "judge_noise")[result["version"]].content
    assert recorded == {"noise": result["noise"], "groups": 1, "trajectories": 2}


def test_a_judge_file_that_is_no_judge_is_named(project: Project, tmp_path: Path) -> None:
    (project.folder / "odd.yaml").write_text("{kind: ruler, base_url: 'http://h', model: m, api_key: sk-secret}")
    done = project.run("judge", "lint", "--judge", "odd.yaml", "--answer", "x")
    assert done.returncode == 1
    assert "api_key" in done.stdout
    assert "sk-secret" not in done.stdout


@pytest.mark.slow
def test_lint_ends_with_what_it_found_also_as_json(project: Project, store: Store) -> None:
    (project.folder / "odd.py").write_text(
        "def crashes(response):\n    raise ValueError(response)\n\n\n"
        "def forgets(response):\n    if response == 'Oslo':\n        return 1.0\n\n\n"
        "def by_tool(trajectory):\n    return float('finish' in str(trajectory['messages']))\n"
    )
    for name, outcome, code in (
        ("crashes", "crashes", 1),
        ("forgets", "missing_return", 1),
        ("by_tool", "not_examined", 3),
    ):
        done = project.run("judge", "lint", "--judge", f"./odd.py:{name}", "--answer", "Oslo", "--json")
        result = json.loads(done.stdout)
        assert (result["outcome"], result["sound"], done.returncode) == (outcome, False, code), done.stdout
    done = project.run("judge", "lint", "--judge", "odd.py:forgets", "--answer", "Oslo")
    assert "NONE          -  empty" in done.stdout
    assert "a return is missing" in done.stdout


@pytest.mark.slow
def test_lint_takes_a_recorded_trajectory(project: Project, store: Store) -> None:
    answered_trajectory(store, "t1", "Oslo")
    words = ("judge", "lint", "--judge", "careful:judge", "--store", "judged.db")
    assert project.run(*words).returncode == 2
    done = project.run(*words, "--trajectory", "t1", "--json")
    result = json.loads(done.stdout)
    assert (result["outcome"], result["findings"][0]["answer"], done.returncode) == ("sound", "Oslo", 0)
