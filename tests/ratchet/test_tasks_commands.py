"""`ratchet tasks`: exactly the rows, imports by name, and a huge file that costs no more than a small one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ratchet.output import ProgressLines
from tests.harness.cli.project import Project
from tests.harness.cli.scripted_data_hub import hub_with

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}, {"question": "What is 5 * 6?", "answer": "30"}]
SHOWN = """\
[
  {
    "question": "What is 2 + 2?",
    "answer": "4"
  },
  {
    "question": "What is 5 * 6?",
    "answer": "30"
  }
]
"""


@pytest.fixture
def folder(project: Project) -> Path:
    made = project.folder / "my_dataset"
    made.mkdir()
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"question": "third"}]))
    (made / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    return made


def test_preview_prints_exactly_the_rows(project: Project, folder: Path) -> None:
    shown = project.call("tasks", "preview", "my_dataset", "--split", "train", "-n", "2")
    assert (shown.returncode, shown.stdout) == (0, SHOWN)


def test_preview_shows_no_character_that_steers_the_terminal(project: Project) -> None:
    row = {"question": "red \x1b[31m \u202e \x7f Zürich"}
    (project.folder / "a.jsonl").write_text(json.dumps(row) + "\n")
    shown = project.call("tasks", "preview", "a.jsonl").stdout
    assert not {"\x1b", "\u202e", "\x7f"} & set(shown)
    assert "Zürich" in shown
    assert json.loads(shown) == [row]


def test_an_imported_set_is_listed_and_previewed_by_its_name(project: Project, folder: Path) -> None:
    made = project.call("tasks", "import", "my_dataset", "--name", "sums")
    assert made.returncode == 0, made.stdout
    assert "sums: 3 train, 1 test" in made.stdout
    assert "1 tasks are in more than one split" in made.stdout
    assert project.call("tasks", "preview", "sums").stdout == SHOWN
    (listed,) = json.loads(project.call("tasks", "list", "--json").stdout)
    assert (listed["name"], listed["source"], listed["splits"]) == ("sums", "my_dataset", {"train": 3, "test": 1})
    assert project.call("tasks", "import", "my_dataset", "--name", "sums").returncode == 1


def test_one_split_is_divided_at_the_import(project: Project) -> None:
    (project.folder / "q.csv").write_text("q\n" + "".join(f"{number}\n" for number in range(50)))
    made = json.loads(project.call("tasks", "import", "q.csv", "--test-size", "0.2", "--json").stdout)
    assert made["name"] == "q"
    assert sum(made["splits"].values()) == 50
    assert 3 < made["splits"]["test"] < 20


def test_errors_are_one_line_that_names_the_thing(project: Project, folder: Path) -> None:
    missing = project.call("tasks", "preview", "my_dataset", "--split", "validation")
    assert (missing.returncode, missing.stdout.strip()) == (
        1, "ratchet: task set my_dataset has no split 'validation'; it has train, test",
    )  # fmt: skip
    unknown = project.call("tasks", "preview", "./nothing")
    assert unknown.returncode == 1
    assert "no such file or folder here" in unknown.stdout
    assert "imported sets: none" in unknown.stdout


def test_a_preview_of_ten_gigabytes_takes_less_than_a_second_of_work(project: Project) -> None:
    huge = project.folder / "huge.jsonl"
    huge.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    os.truncate(huge, 10 * 2**30)  # sparse: what comes after the rows would be broken, and is not read
    before = os.times()
    assert project.run("tasks", "preview", "huge.jsonl").stdout == SHOWN
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


@pytest.mark.slow
def test_a_hub_name_is_read_from_the_hub_that_the_environment_names(project: Project) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with hub_with("acme/sums", {"train.jsonl": rows, "test.jsonl": rows[: rows.index(b"\n") + 1]}) as hub:
        given = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(project.folder / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
        }
        made = project.run("tasks", "import", "acme/sums", "--name", "sums", seconds=60, **given)
        assert "sums: 2 train, 1 test" in made.stdout
    assert project.call("tasks", "preview", "sums").stdout == SHOWN
    offline = project.run(
        "tasks", "preview", "acme/never", seconds=60, **given | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    )
    assert offline.returncode == 1
    assert "`datasets` cannot load it" in offline.stdout
    assert "Offline" in offline.stdout


def test_without_a_terminal_progress_is_printed_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    report_progress = ProgressLines(lambda: now[0])
    for _ in range(30):
        now[0] += 1.0
        report_progress("measuring", 1, 30)
    assert capsys.readouterr().err.splitlines() == [
        "measuring 10 of 30, 20 s left",
        "measuring 20 of 30, 10 s left",
    ]
