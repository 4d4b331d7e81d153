"""Real mails for the e-mail agent, through `datasets`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import read_tasks

ROOT = Path(__file__).parents[2]


def build_from_hub(tmp_path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: `datasets` reads its cache folders when imported."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.email_search.real_mails", "--home", str(tmp_path)]
    return subprocess.run([*command, "--dataset", *names], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_mails_and_questions_load_through_datasets(tmp_path: Path) -> None:
    mails, questions = tmp_path / "mails", tmp_path / "questions"
    mails.mkdir()
    questions.mkdir()
    mail = {"Message_ID": "<1@thyme>", "From": "steve@example.com", "Subject": "NERC letter", "Body": "By Monday."}
    mail["To"] = "Joe <Joe@corp.example>, ann@corp.example"
    (mails / "train.jsonl").write_text(json.dumps({**mail, "Date": "1999-12-11"}) + "\n", "utf-8")
    (questions / "train.jsonl").write_text(
        json.dumps(
            {"question": "When?", "answer": "Monday", "inbox_address": "joe@corp.example", "query_date": "1999-12-12"}
        )
        + "\n",
        "utf-8",
    )
    done = build_from_hub(tmp_path, str(mails), str(questions))
    assert done.returncode == 0, done.stderr
    box = Mailbox(tmp_path / DATABASE)
    for address, hits in (("joe@corp.example", 1), ("steve@example.com", 1), ("eve@corp.example", 0)):
        assert len(box.of(address, "1999-12-12").search(["NERC"])) == hits, address
    assert box.search(["NERC", "Monday"]) == [("<1@thyme>", "NERC letter")]
    body = box.read("<1@thyme>")
    box.close()
    assert body is not None
    assert "date: 1999-12-11" in body
    (task,) = read_tasks(tmp_path, "train")
    assert (task.answer, task.inbox, task.date) == ("Monday", "joe@corp.example", "1999-12-12")


@pytest.mark.slow
def test_an_unreachable_hub_is_reported_and_nothing_is_written(tmp_path: Path) -> None:
    done = build_from_hub(tmp_path, "nobody/no-such-mails")
    assert done.returncode == 1
    assert "nobody/no-such-mails" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / DATABASE).exists()
