"""Task sets: every format gives the same tasks, only what is asked for is read, and what is wrong is named."""

from __future__ import annotations

import gzip
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ratchet.trainer.errors import TaskSetError, TaskSetNotFound
from ratchet.trainer.tasks import TaskSet, content_id
from ratchet.tuner.tasks import ImportedTasks, TaskMix, parse_families

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}, {"question": "What is 5 * 6?", "answer": "30"}]


def write(file: Path, rows: list[Any], indent: int | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=indent))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The seed's folder: train.jsonl and test.jsonl."""
    write(tmp_path / "my_dataset" / "train.jsonl", ROWS)
    write(tmp_path / "my_dataset" / "test.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    return tmp_path / "my_dataset"


def ids(source: Path, split: str = "train") -> list[str]:
    return [task.id for task in TaskSet.open(source).rows(split)]


def test_a_folder_has_a_split_per_file_and_previews_exactly_its_rows(folder: Path) -> None:
    (folder / "README.md").write_text("notes")
    (folder / "notes.txt").write_text("not a split")
    write(folder / "hard.jsonl", ROWS[:1])
    tasks = TaskSet.open(folder)
    assert (tasks.name, tasks.splits()) == ("my_dataset", ("train", "hard", "test"))
    assert tasks.preview("train", 2) == ROWS
    assert tasks.preview("train", 1) == ROWS[:1]


def test_every_format_gives_the_same_tasks(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    expected = [content_id(row) for row in ROWS]
    (tmp_path / "a.csv").write_text('question,answer\nWhat is 2 + 2?,4\n"What is 5 * 6?",30\n')
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.jsonl", ROWS),
        write(tmp_path / "a.json", ROWS),
        write(tmp_path / "b.json", ROWS, indent=4),
        tmp_path / "a.csv",
        tmp_path / "a.parquet",
    ]
    assert all(ids(file) == expected for file in files)
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    assert TaskSet.open(tmp_path / "a.txt").preview("train", 5) == [{"text": "first"}, {"text": "second"}]


def test_the_id_is_the_contents_whatever_the_order_of_keys() -> None:
    assert content_id({"a": 1, "b": [True, None], "c": None}) == content_id({"b": [True, None], "a": "1"})
    assert content_id({"a": 1}) != content_id({"a": 2})
    assert content_id({"a": 1.0}) == content_id({"a": 1})
    assert content_id({"a": {"b": "x"}}) != content_id({"a": {"c": "x"}})


def test_a_json_list_of_rows_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    rows = [{"question": "x" * 50_000, "number": number} for number in range(8)]
    assert TaskSet.open(write(tmp_path / "a.json", rows)).preview("train", 99) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"q": 1}\n\n{"q": \n', "line 3: not JSON"),
        ("a.jsonl", '{"q": 1}\n[1]\n', "line 2: a row is an object"),
        ("a.jsonl", '{"q": NaN}\n', "line 1: NaN is not JSON"),
        ("a.jsonl", '{"q": 1}\n{"q": "a\\ud83d"}\n', "line 2: q has half of a surrogate pair at character 2"),
        ("a.jsonl", '{"q": {"\\ud83d": 1}}\n', "line 1: a key of q has half of a surrogate pair"),
        ("a.jsonl", "[" * 100_000, "line 1: nested too deep"),
        ("a.jsonl", '{"a":' * 900 + "1" + "}" * 900, "line 1: .* is nested deeper than 100 levels"),
        ("a.json", '[\n{"q": 1},\n{"q": 2\n', "line 3: not JSON"),
        ("a.json", '[\n{"q": 1},\n', "line 3: the list does not end"),
        ("a.json", '[\n{"q": 1},\n7]', "line 3: a row is an object"),
        ("a.csv", "q,a\n1,2\n1,2,3\n", "line 3: 3 fields, the header has 2"),
        ("a.csv", "q,q\n1,2\n", "line 1: the header "),
        ("a.csv", 'q,a\n1,2\n"x\n', "line 3: unexpected end of data"),
        ("a.parquet", "PAR0", "a.parquet, after row 0"),
    ],
)
def test_a_broken_row_is_an_error_with_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskSetError, match=message.replace("[", r"\[")) as raised:
        list(TaskSet.open(tmp_path / name).rows("train"))
    assert str(tmp_path / name) in str(raised.value)


def test_text_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"q": "\xff"}\n')
    with pytest.raises(TaskSetError, match="not UTF-8"):
        list(TaskSet.open(tmp_path / "a.jsonl").rows("train"))


def test_zipped_text_is_read_and_a_truncated_or_unzipped_file_is_reported(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1?"} for number in range(300)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "set").mkdir()
    for name in ("train-00000-of-00002.jsonl.gz", "train-00001-of-00002.jsonl.gz", "test.jsonl.gz"):
        half = text[: len(text) // 2] if "0-of" in name else text
        (tmp_path / "set" / name).write_bytes(gzip.compress(half[: half.rindex("\n") + 1].encode()))
    found = TaskSet.open(tmp_path / "set")
    assert (found.splits(), found.preview("test", 300)) == (("train", "test"), rows)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(random.Random(0).randbytes(90_000).hex().encode())[:40_000])
    (tmp_path / "no.csv.gz").write_bytes(b"a,b\n1,2\n")
    for name, message in (("cut.jsonl.gz", "ended before"), ("no.csv.gz", "line 1: Not a gzipped file")):
        with pytest.raises(TaskSetError, match=message):
            TaskSet.open(tmp_path / name).preview("train")
    (tmp_path / "x.parquet.gz").touch()
    with pytest.raises(TaskSetNotFound, match=r"text also as .gz.*not .parquet.gz"):
        TaskSet.open(tmp_path / "x.parquet.gz")


def test_a_row_is_read_lazily(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": 1}\nbroken\n')
    assert TaskSet.open(tmp_path / "a.jsonl").preview("train", 1) == [{"q": 1}]


def test_a_missing_split_names_those_that_there_are(folder: Path) -> None:
    with pytest.raises(TaskSetError, match="no split 'validation'; it has train, test"):
        TaskSet.open(folder).rows("validation")


def test_an_empty_set_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(TaskSetError, match="holds no row"):
        TaskSet.open(tmp_path / "a.jsonl").preview("train", 1)
    with pytest.raises(TaskSetError):
        list(TaskSet.open(tmp_path / "a.jsonl").rows("train"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskSetNotFound, match=r"holds no train\.jsonl"):
        TaskSet.open(tmp_path / "empty")


def test_equal_rows_are_one_task_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "a.jsonl", [*ROWS, dict(reversed(ROWS[0].items()))])
    with caplog.at_level(logging.WARNING):
        assert [task.number for task in TaskSet.open(file).rows("train")] == [1, 2]
    assert "rows=1 kept=2" in caplog.text
    duplicates: list[tuple[int, int]] = []
    assert len(list(TaskSet.open(file).rows("train", on_duplicate=lambda *pair: duplicates.append(pair)))) == 2
    assert duplicates == [(1, 3)]


def test_one_split_is_divided_by_content_and_no_task_is_in_both(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [{"question": f"{number}?"} for number in range(400)]
    tasks = TaskSet.open(write(tmp_path / "a.jsonl", rows)).split(0.8, seed=1)
    train, test = ({task.id for task in tasks.rows(split)} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 400
    assert 50 < len(test) < 110
    again = TaskSet.open(write(tmp_path / "b.jsonl", rows[::-1])).split(0.8, seed=1)
    assert {task.id for task in again.rows("test")} == test
    assert {task.id for task in TaskSet.open(tmp_path / "a.jsonl").split(0.8, seed=2).rows("test")} != test


def test_a_set_with_splits_is_not_divided_again(folder: Path) -> None:
    with pytest.raises(TaskSetError, match="has the splits train, test: no --test-size"):
        TaskSet.open(folder).split()


def test_a_hub_name_without_a_network_fails_fast_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    began = time.monotonic()
    with pytest.raises(TaskSetNotFound, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached"):
        TaskSet.open("openai/gsm8k:main")
    assert time.monotonic() - began < 5


def test_a_folder_in_the_hubs_layout_goes_through_datasets(tmp_path: Path) -> None:
    write(tmp_path / "set" / "data" / "train.jsonl", ROWS)
    write(tmp_path / "set" / "data" / "test.jsonl", ROWS[:1])
    tasks = TaskSet.open(tmp_path / "set")
    assert tasks.splits() == ("train", "test")
    assert tasks.preview("train", 2) == ROWS
    assert [task.id for task in tasks.rows("train")] == [content_id(row) for row in ROWS]


def test_a_path_that_is_not_there_is_no_hub_name() -> None:
    for source in ("./nowhere", "nowhere.jsonl", "/a/b/c"):
        with pytest.raises(TaskSetNotFound, match="no such file or folder"):
            TaskSet.open(source)


def test_an_import_is_found_by_name_and_counts_what_is_twofold(folder: Path, tmp_path: Path) -> None:
    write(folder / "train.jsonl", [*ROWS, ROWS[1]])
    write(folder / "test.jsonl", ROWS[:1])
    imported = ImportedTasks(tmp_path / "tasks")
    made = imported.add(TaskSet.open(folder), "math")
    assert (made.splits, made.duplicates, made.in_several) == ({"train": 2, "test": 1}, {"train": 1}, 1)
    assert imported.all() == [made]
    tasks = imported.open("math")
    assert (tasks.name, tasks.splits(), tasks.preview("train", 9)) == ("math", ("train", "test"), ROWS)
    with pytest.raises(TaskSetError, match="already exists: give --replace"):
        imported.add(TaskSet.open(folder), "math")
    write(folder / "train.jsonl", ROWS[:1])
    imported.add(TaskSet.open(folder), "math", replace=True)
    assert imported.open("math").preview("train", 9) == ROWS[:1]
    assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["math"]


def test_nothing_is_half_imported(folder: Path, tmp_path: Path) -> None:
    imported = ImportedTasks(tmp_path / "tasks")
    imported.add(TaskSet.open(folder), "math")
    (folder / "train.jsonl").write_text('{"question": "other"}\nbroken\n')
    with pytest.raises(TaskSetError, match="line 2"):
        imported.add(TaskSet.open(folder), "math", replace=True)
    assert imported.open("math").preview("train", 9) == ROWS
    assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["math"]


def test_a_set_whose_replacement_was_killed_between_the_two_renames_is_there_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    imported = ImportedTasks(tmp_path / "tasks")
    made = imported.add(TaskSet.open(folder), "math")
    for look in (lambda: imported.open("math").preview("train", 9), lambda: imported.all()):
        (tmp_path / "tasks" / "math").rename(tmp_path / "tasks" / ".replaced-math")
        assert look() in (ROWS, [made])
    (tmp_path / "tasks" / "math").rename(tmp_path / "tasks" / ".replaced-math")
    with pytest.raises(TaskSetError, match="already exists"):
        imported.add(TaskSet.open(folder), "math")
    imported.add(TaskSet.open(folder), "math", replace=True)
    assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["math"]


def test_a_set_stays_where_the_new_one_cannot_take_its_place(folder: Path, tmp_path: Path) -> None:
    imported = ImportedTasks(tmp_path / "tasks")
    imported.add(TaskSet.open(folder), "math")
    write(folder / "train.jsonl", ROWS[:1])

    def spoils() -> None:  # what was written aside is gone when its turn comes
        (aside,) = (tmp_path / "tasks").glob(".import-*")
        aside.rename(tmp_path / "gone")
        (tmp_path / "gone").rename(tmp_path / "tasks" / "math" / "in the way")

    with pytest.raises(TaskSetError, match="cannot be written"):
        imported.add(TaskSet.open(folder), "math", replace=True, on_row=spoils)
    assert imported.open("math").preview("train", 9) == ROWS


def test_a_name_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("../x", "/x", "", ".hidden", "a/b", "a.jsonl"):
        with pytest.raises(TaskSetError, match="--name"):
            ImportedTasks(tmp_path / "tasks").add(TaskSet.open(folder), name)


def task_file(folder: Path, name: str, count: int) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"{name} {number}"}) for number in range(count)))
    return file


@pytest.fixture
def mix(tmp_path: Path) -> TaskMix:
    mail, sums = task_file(tmp_path, "mail", 10), task_file(tmp_path, "sums", 7)
    return TaskMix(parse_families([f"mail={mail}:3", f"math={sums}"]), seed=1)


def test_families_are_drawn_by_their_weights(mix: TaskMix) -> None:
    drawn = Counter(task.id.partition("/")[0] for number in range(100) for task in mix.draw(number, 20))
    assert sum(drawn.values()) == 2000
    assert 0.7 < drawn["mail"] / 2000 < 0.8


def test_every_task_of_a_family_comes_once_before_any_comes_again(mix: TaskMix) -> None:
    drawn = [task.id for number in range(20) for task in mix.draw(number, 8) if task.id.startswith("math/")]
    for start in range(0, len(drawn) - 7, 7):
        assert len(set(drawn[start : start + 7])) == 7
    assert drawn[:7] != drawn[7:14], "the order is reshuffled"


def test_a_round_draws_the_same_whatever_was_drawn_before(mix: TaskMix, tmp_path: Path) -> None:
    again = TaskMix(parse_families([f"mail={tmp_path}/mail.jsonl:3", f"math={tmp_path}/sums.jsonl"]), seed=1)
    for number in range(3):
        mix.draw(number, 12)
    assert mix.draw(3, 12) == again.draw(3, 12)


def test_families_have_a_name_a_source_and_a_weight(tmp_path: Path) -> None:
    mail = task_file(tmp_path, "mail", 1)
    (plain,) = parse_families([str(mail)])
    (named,) = parse_families([f"post={mail}:0.5"])
    assert (plain.name, plain.weight, named.name, named.weight) == ("mail", 1.0, "post", 0.5)
    assert named.of("train")[0].id.startswith("post/")


@pytest.mark.parametrize("given", [["{mail}", "{mail}"], ["a={mail}:0"], ["a={mail}:-1"], ["a={mail}:nan"]])
def test_what_means_nothing_is_refused(tmp_path: Path, given: list[str]) -> None:
    mail = task_file(tmp_path, "mail", 1)
    with pytest.raises(TaskSetError, match="--tasks"):
        parse_families([one.format(mail=mail) for one in given])
