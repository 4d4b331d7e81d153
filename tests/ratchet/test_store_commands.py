"""The store's commands as a user runs them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.records import answered_trajectory, judged_group


@pytest.fixture
def url(project: Project) -> str:
    """A store with two old trajectories that a round trained, an old and a new one that it did not."""
    file = str(project.folder / "filled.db")
    store = open_store(file)
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    store.policies.register_base("agent", "base")
    held = store.rounds.start("agent", 0)
    store.rounds.commit(held.id, version=1, checkpoint="/c/0001", groups=[group.id], metrics={})
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
    assert (unknown.returncode, "no key nokey in this store, and no trajectory of it" in unknown.stdout) == (1, True)
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
