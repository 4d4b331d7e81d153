"""`ratchet policies fork`: a version of one agent as a candidate of another, from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters import checkpoint
from tests.harness.cli.project import Project


@pytest.fixture
def url(project: Project, migrated: Path) -> str:
    shutil.copy(migrated, project.folder / "made.db")
    project.write(
        agents={"mail": {"judge": "m:judge"}, "support": {"judge": "s:judge", "learner": {"lora_alpha": 16}}},
        learner={"lora_r": 4, "lora_alpha": 16},
    )
    return f"sqlite:///{project.folder / 'made.db'}"


@pytest.fixture
def store(project: Project, url: str) -> Iterator[Store]:
    """mail@1 is live, and its checkpoint has no learner's state."""
    opened = open_store(url)
    for alias in ("mail", "support"):
        opened.policies.register_base(alias, "base")
    folder = project.state / "models" / "mail" / "checkpoints" / "0001"
    checkpoint.write_atomically(folder, write_adapter)
    held = opened.rounds.start("mail", 0)
    opened.rounds.commit(held.id, version=1, checkpoint=str(folder), groups=[], metrics={})
    opened.policies.promote("mail", 1, {})
    yield opened
    opened.close()


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")


def test_a_version_becomes_a_candidate_of_another_agent(project: Project, store: Store, url: str) -> None:
    done = project.call("policies", "fork", "mail@1", "support", "--store", url)
    assert done.stdout == (
        "support@1 is a candidate: a copy of mail@1\n"
        "mail@1 has no learner's state any more (trainer.keep_optimizer_states): the optimizer of support starts over\n"
    )
    made = store.policies.get("support", 1)
    folder = project.state / "models" / "support" / "checkpoints" / "0001"
    assert (made.state, made.adapter) == ("candidate", str(folder))
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    again = project.call("policies", "fork", "mail@1", "support", "--store", url)
    assert again.returncode == 1
    assert "support@1 is a candidate that is not decided: wait for it, or decide with" in again.stdout


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("mail@7", "support", "no policy mail@7"),
        ("male@1", "support", "male: no such agent in this store; did you mean mail?"),
        ("mail", "support", "'mail' is not a version: give NAME@VERSION, such as mail@7"),
        ("mail@0", "support", "mail@0 has no adapter: it is the base model"),
        ("mail@1", "mail", "mail@1 is a version of mail already"),
        ("mail@1", "suport", "suport"),
    ],
)
def test_what_cannot_be_forked_is_refused(
    project: Project, store: Store, url: str, source: str, target: str, message: str
) -> None:
    refused = project.call("policies", "fork", source, target, "--store", url)
    assert refused.returncode in (1, 2)
    assert message in refused.stdout
    assert "Traceback" not in refused.stdout
    assert len(store.policies.all("support")) == 1
