"""`ratchet policies`: listed, promoted, pinned; a fork of another agent and an import as candidates."""

from __future__ import annotations

import json
import re
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
from tests.harness.records import commit_round, judged_group


@pytest.fixture
def url(project: Project, migrated: Path) -> str:
    shutil.copy(migrated, project.folder / "made.db")
    return f"sqlite:///{project.folder / 'made.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    opened.policies.register_base("mail", "base")
    for version in (1, 2, 3):
        commit_round(opened, "mail", version)
        if version < 3:
            opened.policies.promote(
                "mail", version, {"proof": {"worst": 0.001}}, reason="its logprobs are the trainer's"
            )
    opened.policies.start_ramp("mail", 3, 0.25)
    yield opened
    opened.close()


def test_the_scores_of_a_ramp_and_all_decisions_are_shown(project: Project, store: Store, url: str) -> None:
    judged_group(store, ["a", "b"], [0.5, 1.0], alias="mail", versions=(3, 3))
    output = project.call("policies", "show", "mail", "--store", url).stdout
    assert "ramp mail@3 25%: ramp 2 scores, mean 0.750, live 0 scores" in output
    assert "promote by proof" in output
    assert "proof.worst: 0.001" in output
    listed = json.loads(project.call("policies", "list", "--store", url, "--json").stdout)
    assert [one["decision"] and one["decision"]["action"] for one in listed] == [None, "promote", "promote", "ramp"]
    status = project.call("status", "--json", "--project", "default").stdout
    assert json.loads(status)["project"] == "default"


def test_a_version_in_its_ramp_is_promoted_or_taken_back_by_hand_with_the_reason(
    project: Project, store: Store, url: str
) -> None:
    assert project.call("policies", "promote", "mail", "--store", url).returncode == 2  # no reason
    taken = project.call("policies", "rollback", "mail", "--reason", "too short", "--store", url)
    assert taken.stdout == "mail@2 is live; rejected: mail@3\n"
    assert store.decisions.decisions_of("mail", 3)[0].reason == "too short"
    refused = project.call("policies", "promote", "mail", "3", "--reason", "it is fine after all", "--store", url)
    assert refused.returncode == 1
    assert "mail@3 was rejected by" in refused.stdout
    assert re.search(r"\(too short\): .*--rejected", refused.stdout)
    fine = ("promote", "mail", "3", "--rejected", "--reason", "it is fine after all")
    done = project.call("policies", *fine, "--store", url)
    assert done.stdout == "mail@3 is live\nits files were not checked: /c/3 is not on this machine\n"


def test_an_unproven_version_is_promoted_with_the_reason_of_its_proof(project: Project, store: Store, url: str) -> None:
    commit_round(store, "mail", 4)
    store.policies.mark_unproven("mail", 4, {}, reason="0.00001 nats is less than vLLM's rounding")
    done = project.call("policies", "promote", "mail@4", "--reason", "it is fine", "--store", url)
    assert done.stdout.startswith("mail@4 is live\nwarning: mail@4 was unproven: 0.00001 nats is less than vLLM's")
    assert done.returncode == 0


def test_versions_are_held_pinned_and_rolled_back_at_once_by_hand(project: Project, store: Store, url: str) -> None:
    def decide(*words: str) -> str:
        return project.call("policies", *words, "--reason", "a fair", "--store", url).stdout

    assert decide("hold", "mail") == "mail@3 (ramp) is held: promote it or roll it back\n"
    assert decide("pin", "mail") == "mail@2 is pinned\n"
    shown = project.call("policies", "show", "mail", "--store", url).stdout
    assert shown.startswith("serving       @2 live 100%; the anchor is @2\nPINNED        by ")
    assert "`ratchet policies unpin mail`" in decide("rollback", "mail@1", "--now")
    assert decide("unpin", "mail@2") == "mail@2 is not pinned any more\n"
    back = decide("rollback", "mail@1", "--now")
    assert back == "mail@1 is live; rejected: mail@2, mail@3; open trajectories go on with it\n"
    assert [bool(one.recalled_at) for one in store.policies.all("mail")] == [False, False, True, True]


def test_a_version_may_be_named_as_agents_name_it(project: Project, store: Store, url: str) -> None:
    assert "promote by proof" in project.call("policies", "show", "mail@2", "--store", url).stdout
    back = project.call("policies", "rollback", "mail@1", "--reason", "rude", "--store", url)
    assert back.stdout == "mail@1 is live; rejected: mail@2, mail@3\n"
    again = project.call("policies", "promote", "mail@2", "--rejected", "--reason", "it is not", "--store", url)
    assert again.stdout.startswith("mail@2 is live\n")
    unknown = project.call("policies", "show", "male", "--store", url)
    assert unknown.returncode == 2
    assert "male: no such agent in this store; did you mean mail?" in unknown.stdout


@pytest.mark.slow
def test_going_back_rejects_what_came_after(project: Project, store: Store, url: str) -> None:
    assert (
        "nothing to roll back"
        not in project.call("policies", "rollback", "mail", "--reason", "x", "--store", url).stdout
    )
    back = project.call("policies", "rollback", "mail", "--reason", "rude", "--store", url)
    assert back.stdout == "mail@1 is live; rejected: mail@2\n"
    refused = project.call("policies", "promote", "mail", "0", "--reason", "x", "--store", url)
    assert refused.returncode == 1
    assert "roll back to it instead" in refused.stdout
    unknown = project.call("policies", "promote", "mail", "9", "--reason", "x", "--store", url)
    assert "no policy mail@9" in unknown.stdout


def write_adapter(inner: Path) -> None:
    (inner / "adapter_model.safetensors").write_bytes(b"w")
    (inner / "adapter_config.json").write_text('{"r": 8}')


def test_a_version_with_a_damaged_file_is_not_promoted(project: Project, store: Store, url: str) -> None:
    folder = project.folder / "checkpoints" / "0004"
    checkpoint.write_atomically(folder, write_adapter)
    commit_round(store, "mail", 4, checkpoint=str(folder))
    store.policies.reject("mail", 4, {})
    weights, promote = folder / "adapter_model.safetensors", ("policies", "promote", "mail@4", "--rejected")
    weights.write_bytes(b"v")
    refused = project.call(*promote, "--reason", "it is fine", "--store", url)
    assert refused.returncode == 1
    text = " ".join(refused.stdout.split())
    assert re.search(f"{weights} .* checksum is wrong; restore it from a backup", text)
    weights.unlink()
    assert "adapter_model.safetensors" in project.call(*promote, "--reason", "it is fine", "--store", url).stdout
    assert store.policies.live()["mail"].version == 2
    weights.write_bytes(b"w")
    done = project.call(*promote, "--reason", "it is restored", "--store", url)
    assert done.stdout == "mail@4 is live\n"


@pytest.mark.slow
def test_a_version_is_exported_or_the_reason_why_not(project: Project, store: Store, url: str) -> None:
    folder = project.folder / "checkpoints" / "0004"
    checkpoint.write_atomically(folder, write_adapter)
    commit_round(store, "mail", 4, checkpoint=str(folder), metrics={"trajectories": 8})
    store.policies.promote("mail", 3, {})
    done = project.run("policies", "export", "mail@4", "--adapter", "out", "--store", url)
    assert done.stdout.startswith("mail@4: out, with")  # its card, or the plug-in that would add it
    assert (project.folder / "out" / "adapter_model.safetensors").read_bytes() == b"w"
    again = project.run("policies", "export", "mail", "4", "--adapter", "again", "--store", url)
    assert again.stdout.startswith("mail@4: again, with")
    for name, reason in (
        ("mail@0", "it is the base model"),
        ("mail@2", "is missing or incomplete"),
        ("mail@9", "no policy mail@9"),
        ("mail", "give NAME@VERSION or NAME VERSION, such as mail@7"),
    ):
        refused = project.run("policies", "export", name, "--adapter", "other", "--store", url)
        assert refused.returncode
        assert reason in refused.stdout
    assert "give one of --merged" in project.run("policies", "export", "mail@4", "--store", url).stdout
    assert "already exists" in project.run("policies", "export", "mail@4", "--merged", "out", "--store", url).stdout


@pytest.mark.slow
def test_a_versions_prompt_is_shown_and_steers_no_terminal(project: Project, store: Store, url: str) -> None:
    text = "Be brief.\n\x1b[2JErase"
    prompt = store.prompts.register(text, "append", "a model\x07", families={"task:math": "Check the units."})
    made = store.policies.register_prompt_version("mail", prompt.id, {})
    listed = project.call("policies", "list", "--store", url).stdout
    assert f"/c/2  prompt {prompt.id}" in next(line for line in listed.splitlines() if line.startswith("mail@4"))
    for version in (["4"], []):
        output = project.call("policies", "show", "mail", *version, "--store", url).stdout
        assert f"mail@4 has prompt {prompt.id} (append, by a model\N{REPLACEMENT CHARACTER})" in output
        assert (
            "    Be brief.\n    \N{REPLACEMENT CHARACTER}[2JErase\n  for task:math:\n    Check the units.\n" in output
        )
    assert "prompt" not in project.call("policies", "show", "mail", "2", "--store", url).stdout
    plain = json.loads(project.call("policies", "show", "mail", "--store", url, "--json").stdout)
    assert plain["prompts"][str(made.version)]["text"] == text


@pytest.fixture
def fork_url(project: Project, migrated: Path) -> str:
    shutil.copy(migrated, project.folder / "made.db")
    project.write(
        agents={"mail": {"judge": "m:judge"}, "support": {"judge": "s:judge", "learner": {"lora_alpha": 16}}},
        learner={"lora_r": 4, "lora_alpha": 16},
    )
    return f"sqlite:///{project.folder / 'made.db'}"


@pytest.fixture
def fork_store(project: Project, fork_url: str) -> Iterator[Store]:
    """mail@1 is live, and its checkpoint has no learner's state."""
    opened = open_store(fork_url)
    for alias in ("mail", "support"):
        opened.policies.register_base(alias, "base")
    folder = project.state / "models" / "mail" / "checkpoints" / "0001"
    checkpoint.write_atomically(folder, write_forked)
    commit_round(opened, "mail", 1, checkpoint=str(folder))
    opened.policies.promote("mail", 1, {})
    yield opened
    opened.close()


def write_forked(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")


def test_a_version_becomes_a_candidate_of_another_agent(project: Project, fork_store: Store, fork_url: str) -> None:
    done = project.call("policies", "fork", "mail@1", "support", "--store", fork_url)
    assert done.stdout == (
        "support@1 is a candidate: a copy of mail@1\n"
        "mail@1 has no learner's state any more (trainer.keep_optimizer_states): the optimizer of support starts over\n"
    )
    made = fork_store.policies.get("support", 1)
    folder = project.state / "models" / "support" / "checkpoints" / "0001"
    assert (made.state, made.adapter) == ("candidate", str(folder))
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    again = project.call("policies", "fork", "mail@1", "support", "--store", fork_url)
    assert again.returncode == 1
    assert "support@1 is a candidate " in again.stdout


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("mail@7", "support", "no policy mail@7"),
        ("male@1", "support", "male: no such agent in this store; did you mean mail?"),
        ("mail", "support", "such as mail@7"),
        ("mail@0", "support", "mail@0 has no adapter"),
        ("mail@1", "mail", "mail@1 is a version of mail already"),
        ("mail@1", "suport", "suport"),
    ],
)
def test_what_cannot_be_forked_is_refused(
    project: Project, fork_store: Store, fork_url: str, source: str, target: str, message: str
) -> None:
    refused = project.call("policies", "fork", source, target, "--store", fork_url)
    assert refused.returncode in (1, 2)
    assert message in refused.stdout
    assert "Traceback" not in refused.stdout
    assert len(fork_store.policies.all("support")) == 1


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16}


@pytest.fixture
def import_url(project: Project, migrated: Path) -> str:
    shutil.copy(migrated, project.folder / "made.db")
    project.write(agents={"mail": {"judge": "m:judge"}}, learner={"lora_r": 4, "lora_alpha": 16})
    return f"sqlite:///{project.folder / 'made.db'}"


@pytest.fixture
def import_store(import_url: str) -> Iterator[Store]:
    opened = open_store(import_url)
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
    project: Project, import_store: Store, import_url: str, tmp_path: Path
) -> None:
    given = adapter(tmp_path / "given")
    done = project.call("policies", "import", str(given), "mail", "--store", import_url)
    assert (done.returncode, done.stdout) == (0, f"mail@1 is a candidate: a copy of {given}\n")
    made = import_store.policies.get("mail", 1)
    folder = project.state / "models" / "mail" / "checkpoints" / "0001"
    assert (made.state, made.adapter, made.served_name) == ("candidate", str(folder), "mail@1")
    assert made.evidence["origin"]["imported_from"] == str(given)
    assert checkpoint.complete(folder)
    assert (folder / checkpoint.ADAPTER_ONLY).is_file()
    assert not (folder / "notes.txt").exists()
    again = project.call("policies", "import", str(given), "mail", "--store", import_url)
    assert again.returncode == 1
    assert "mail@1 is a candidate " in again.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 8}, "has r 8, and learner.lora_r of mail is 4"),
        ({"lora_alpha": 8}, "has lora_alpha 8, and learner.lora_alpha of mail is 16"),
        ({"peft_type": "IA3"}, "adapter of type IA3"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_an_adapter_that_the_learner_cannot_train_is_refused(
    project: Project, import_store: Store, import_url: str, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    given = adapter(tmp_path / "given", config=CONFIG | config)
    refused = project.call("policies", "import", str(given), "mail", "--store", import_url)
    assert refused.returncode == 1
    assert message in refused.stdout
    assert len(import_store.policies.all("mail")) == 1


def test_matrices_other_than_those_of_the_newest_version_are_refused(
    project: Project, import_store: Store, import_url: str, tmp_path: Path
) -> None:
    assert (
        project.call("policies", "import", str(adapter(tmp_path / "a")), "mail", "--store", import_url).returncode == 0
    )
    import_store.policies.promote("mail", 1, {})
    refused = project.call("policies", "import", str(adapter(tmp_path / "b", 7)), "mail", "--store", import_url)
    assert refused.returncode == 1
    assert re.search(r"matrices of mail@1: layer.lora_A.weight is \(4, 7\) .*\(4, 6\)", refused.stdout)
    assert (
        project.call("policies", "import", str(adapter(tmp_path / "c")), "mail", "--store", import_url).returncode == 0
    )


def test_a_folder_without_an_adapter_is_refused(
    project: Project, import_store: Store, import_url: str, tmp_path: Path
) -> None:
    refused = project.call("policies", "import", str(tmp_path), "mail", "--store", import_url)
    assert refused.returncode == 1
    assert "adapter_config.json cannot be read" in refused.stdout
    given = adapter(tmp_path / "given")
    (given / "adapter_model.safetensors").write_bytes(b"x")
    refused = project.call("policies", "import", str(given), "mail", "--store", import_url)
    assert "has no readable adapter_model.safetensors" in refused.stdout
    assert (
        "there is no agent 'male'; did you mean mail?"
        in project.call("policies", "import", str(given), "male", "--store", import_url).stdout
    )
