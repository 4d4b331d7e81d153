"""Exports: token-exact, in every format, and readable by the tools that they are for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.records import QUESTION, call_start, ended, judged_group, tool_call

REPLIES = [tool_call(), {"role": "assistant", "content": "Oslo"}]


@pytest.fixture
def url(project: Project) -> str:
    """A store with a judged group of two, and a trajectory of two calls with a tool, a picture and no score."""
    file = str(project.folder / "filled.db")
    store = open_store(file)
    judged_group(store, ["a", "b"], [0.0, 1.0])
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    prompt_messages: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "user", "content": [{"type": "text", "text": "this?"}, picture]},
    ]
    first = call_start("call_1", "talk", prompt_messages, at=500.0)
    later = [*prompt_messages, REPLIES[0], {"role": "tool", "content": "found", "tool_call_id": "c1"}]
    second = call_start("call_2", "talk", later, at=501.0, parent_call="call_1", linked_by="graph")
    store.calls.ship(
        [
            ended(first, REPLIES[0], messages=prompt_messages, prompt=(1, 2, 3), ids=(4, 5)),
            ended(second, REPLIES[1], messages=later, prompt=(6,), ids=(7, 8, 9), context="exact"),
        ]
    )
    store.close()
    return file


def _export(project: Project, url: str, *words: str) -> Path:
    out = project.folder / "out"
    done = project.run("store", "export", "--store", url, "--out", str(out), *words)
    assert done.returncode == 0, done.stdout
    return out


def _is_exact(record: dict[str, Any], url: str) -> None:
    store = open_store(url)
    calls = store.trajectories.read(record["id"]).calls
    store.close()
    for call, exported in zip(calls, record["calls"], strict=True):
        assert tuple(exported["prompt_ids"]) == unpack_ids(call.prompt_ids)
        (answer,) = exported["answers"]
        assert tuple(answer["token_ids"]) == unpack_ids(call.choices[0].token_ids)
        assert tuple(answer["logprobs"]) == unpack_logprobs(call.choices[0].logprobs)


@pytest.mark.slow
def test_lines_contain_chat_ids_mask_and_verdict(project: Project, url: str) -> None:
    records = {one["id"]: one for one in map(json.loads, _export(project, url).read_text().splitlines())}
    assert set(records) == {"a", "b", "talk"}
    talk = records["talk"]
    assert [message["role"] for message in talk["messages"]] == [
        "system",
        "user",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert talk["messages"][2]["content"] == "this?"
    assert talk["messages"][3]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"a": 1}'}
    assert json.loads(talk["messages_json"])[2]["content"][1]["type"] == "image_url"
    (row,) = talk["rows"]
    assert (row["input_ids"], row["mask"]) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 1, 1, 0, 1, 1, 1])
    assert (talk["score"], talk["advantage"]) == (None, None)
    assert (records["b"]["score"], records["a"]["advantage"]) == (1.0, -records["b"]["advantage"])
    assert records["b"]["advantage"] > 0
    _is_exact(talk, url)


@pytest.mark.slow
def test_datasets_reads_parquet_and_trl_rows(project: Project, url: str) -> None:
    import datasets

    cache = str(project.folder / "cache")
    files = str(_export(project, url, "--format", "parquet"))
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    talk = next(one for one in found if one["id"] == "talk")
    assert talk["messages"][3]["tool_calls"][0]["function"]["name"] == "search"
    _is_exact(talk, url)
    rows = str(_export(project, url, "--format", "trl"))
    dataset = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=cache)
    assert {"input_ids", "completion_mask", "assistant_masks", "advantage"} <= set(dataset.column_names)
    assert [sum(mask) for mask in dataset["completion_mask"]] == [5, 2, 2]


@pytest.mark.slow
def test_the_filters_are_those_of_the_lists(project: Project, url: str) -> None:
    def names(*words: str) -> set[str]:
        return {json.loads(line)["id"] for line in _export(project, url, *words).read_text().splitlines()}

    assert names("--state", "grouped") == {"a", "b"}
    assert names("--since", "1970-01-01T00:05:00+00:00") == {"talk"}
    assert names("--task", "t", "--model", "agent", "--version", "0") == {"a", "b"}
    assert names("--tag", "none") == set()


@pytest.mark.slow
def test_parquet_needs_a_file_and_a_broken_export_leaves_none(project: Project, url: str) -> None:
    assert project.run("store", "export", "--format", "parquet", "--store", url).returncode == 2
    missing = project.run("store", "export", "--store", url, "--out", str(project.folder / "no" / "out"))
    assert missing.returncode == 1
    assert missing.stdout.startswith(f"ratchet: --out {project.folder}/no/out: No such file or directory")
    assert not [path for path in project.folder.iterdir() if path.name.startswith(".out")]
