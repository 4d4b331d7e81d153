"""Which tasks a round draws from several families: by weight, each once, the same after a restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ratchet.trainer.errors import TaskSetError
from ratchet.tuner.tasks import TaskMix, parse_families


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
