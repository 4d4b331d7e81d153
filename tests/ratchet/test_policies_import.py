"""`ratchet policies import`: an adapter that was trained elsewhere as a candidate, from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters import checkpoint
from tests.harness.cli.project import Project

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16}


@pytest.fixture
def url(project: Project, migrated: Path) -> str:
    shutil.copy(migrated, project.folder / "made.db")
    project.write(agents={"mail": {"judge": "m:judge"}}, learner={"lora_r": 4, "lora_alpha": 16})
    return f"sqlite:///{project.folder / 'made.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    opened.policies.register_base("mail", "base")
    yield opened
    opened.close()


def adapter(folder: Path, width: int = 6, config: Mapping[str, Any] = CONFIG) -> Path:
    """The folder of a small adapter, with a file that is no part of it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"layer.lora_A.weight": np.ones((4, width), np.float32)}, folder / "adapter_model.safetensors")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_an_adapter_becomes_a_candidate_that_training_goes_on_from(
    project: Project, store: Store, url: str, tmp_path: Path
) -> None:
    given = adapter(tmp_path / "given")
    done = project.call("policies", "import", str(given), "mail", "--store", url)
    assert (done.returncode, done.stdout) == (0, f"mail@1 is a candidate: a copy of {given}\n")
    made = store.policies.get("mail", 1)
    folder = project.state / "models" / "mail" / "checkpoints" / "0001"
    assert (made.state, made.adapter, made.served_name) == ("candidate", str(folder), "mail@1")
    assert made.evidence["origin"]["imported_from"] == str(given)
    assert checkpoint.complete(folder)
    assert (folder / checkpoint.ADAPTER_ONLY).is_file()
    assert not (folder / "notes.txt").exists()
    again = project.call("policies", "import", str(given), "mail", "--store", url)
    assert again.returncode == 1
    assert "mail@1 is a candidate that is not decided: wait for it, or decide with" in again.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 8}, "has r 8, and learner.lora_r of mail is 4: they must be equal"),
        ({"lora_alpha": 8}, "has lora_alpha 8, and learner.lora_alpha of mail is 16"),
        ({"peft_type": "IA3"}, "is an adapter of type IA3, and only LORA can be trained"),
        ({"use_dora": True}, "uses use_dora, which the learner does not train"),
    ],
)
def test_an_adapter_that_the_learner_cannot_train_is_refused(
    project: Project, store: Store, url: str, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    given = adapter(tmp_path / "given", config=CONFIG | config)
    refused = project.call("policies", "import", str(given), "mail", "--store", url)
    assert refused.returncode == 1
    assert message in refused.stdout
    assert len(store.policies.all("mail")) == 1


def test_matrices_other_than_those_of_the_newest_version_are_refused(
    project: Project, store: Store, url: str, tmp_path: Path
) -> None:
    assert project.call("policies", "import", str(adapter(tmp_path / "a")), "mail", "--store", url).returncode == 0
    store.policies.promote("mail", 1, {})
    refused = project.call("policies", "import", str(adapter(tmp_path / "b", 7)), "mail", "--store", url)
    assert refused.returncode == 1
    assert "does not have the matrices of mail@1: layer.lora_A.weight is (4, 7) there and (4, 6) here" in refused.stdout
    assert project.call("policies", "import", str(adapter(tmp_path / "c")), "mail", "--store", url).returncode == 0


def test_a_folder_without_an_adapter_is_refused(project: Project, store: Store, url: str, tmp_path: Path) -> None:
    refused = project.call("policies", "import", str(tmp_path), "mail", "--store", url)
    assert refused.returncode == 1
    assert "is not the folder of a PEFT adapter, its adapter_config.json cannot be read" in refused.stdout
    given = adapter(tmp_path / "given")
    (given / "adapter_model.safetensors").write_bytes(b"x")
    refused = project.call("policies", "import", str(given), "mail", "--store", url)
    assert "has no readable adapter_model.safetensors" in refused.stdout
    assert (
        "there is no agent 'male'; did you mean mail?"
        in project.call("policies", "import", str(given), "male", "--store", url).stdout
    )
