"""`ratchet eval bfcl` with the public package in its own environment, on a scripted engine behind a real proxy."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Send

from ratchet.store.store import Store, open_store
from ratchet.trainer.errors import TrainerError
from ratchet_bfcl.evaluation import find, set_up
from tests.harness.cli.project import Project
from tests.harness.clients.program import HOME, SKIP
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import Json, ScriptedVllm, tool_text
from tests.harness.proxy.servers import served
from tests.harness.records import commit_round

ENVIRONMENT = HOME / "bfcl"
BROKEN = "simple_python_0"


class Engine(ScriptedVllm):
    """Its base model calls no tool and breaks on one entry; its adapters call what the package holds for right."""

    def __init__(self) -> None:
        super().__init__()
        data = next(ENVIRONMENT.glob("lib/python*/site-packages/bfcl_eval/data"))
        answers = _lines(data / "possible_answer" / "BFCL_v4_simple_python.json")
        self.right = {row["id"]: row["ground_truth"][0] for row in answers}
        questions = _lines(data / "BFCL_v4_simple_python.json")
        self.entries = {row["question"][0][0]["content"]: row["id"] for row in questions}

    async def _chat(self, body: Json, receive: Receive, send: Send) -> None:
        if body["model"] == self.base and self.entries.get(body["messages"][-1]["content"]) == BROKEN:
            body = body | {"messages": [{"role": "user", "content": "#status=400"}]}
        await super()._chat(body, receive, send)

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        entry = self.entries.get(body["messages"][-1]["content"])
        right = {"right": entry} if entry and body["model"] != self.base else {}
        await super()._answer(body, {**script, **right}, receive, send)

    def _words(self, script: Mapping[str, str]) -> str:
        if "right" not in script:
            return super()._words(script)
        ((name, possible),) = self.right[script["right"]].items()
        arguments = {key: values[0] for key, values in possible.items() if values[0] != ""}
        return tool_text(name.replace(".", "_"), arguments)


class Conversing(ScriptedVllm):
    """Its adapters do what the package holds for right, turn by turn, with tool results between; its base talks."""

    max_model_len = 10**6

    def __init__(self) -> None:
        super().__init__()
        data = next(ENVIRONMENT.glob("lib/python*/site-packages/bfcl_eval/data"))
        answers = _lines(data / "possible_answer" / "BFCL_v4_multi_turn_base.json")
        self.right = {row["id"]: row["ground_truth"] for row in answers}
        questions = _lines(data / "BFCL_v4_multi_turn_base.json")
        self.entries = {row["question"][0][0]["content"]: row["id"] for row in questions}
        self.results: list[str] = []  # what the package's tools said

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        messages = [one["content"] for one in body["messages"] if one["role"] == "user"]
        last = body["messages"][-1]
        if last["role"] == "tool":
            self.results.append(last["content"])
        text = {"say": "done"}
        if last["role"] == "user" and body["model"] != self.base:
            calls = self.right[self.entries[messages[0]]][len(messages) - 1]
            text |= {"calls": "".join(_call(call, body["tools"]) for call in calls)}
        await super()._answer(body, text, receive, send)

    def _words(self, script: Mapping[str, str]) -> str:
        return script.get("calls") or super()._words(script)


def _call(text: str, tools: Sequence[Json]) -> str:
    """Return a call that is written in Python as the model writes it."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    named = {one["function"]["name"]: one["function"]["parameters"]["properties"] for one in tools}
    places = dict(zip(named[call.func.id], call.args, strict=False))
    given = places | {str(one.arg): one.value for one in call.keywords}
    return tool_text(call.func.id, {name: ast.literal_eval(value) for name, value in given.items()})


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    opened = open_store(str(store_file))
    yield opened
    opened.close()


@pytest.fixture
def proxy(store: Store, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy whose live version is agent@1."""
    with _served(Engine, store, tmp_path) as (_, made):
        yield made


@contextmanager
def _served(engine: type[ScriptedVllm], store: Store, folder: Path) -> Iterator[tuple[ScriptedVllm, Proxy]]:
    if os.environ.get(SKIP):
        pytest.skip(f"{SKIP} is set")
    find(ENVIRONMENT)
    made = engine()
    with served(made) as vllm_url, running(vllm_url, store, folder) as proxy:
        commit_round(store, "agent", 1, checkpoint="/adapters/1")
        store.policies.promote("agent", 1, {})
        yield made, proxy


@pytest.mark.clients
def test_versions_are_measured_before_and_after_and_nothing_of_it_is_trained(
    proxy: Proxy, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    project = Project(tmp_path / "project")
    project.write(model="agent", store=f"sqlite:///{tmp_path / 'store.db'}")
    arguments = ["--environment", str(ENVIRONMENT), "--proxy", proxy.url, "--limit", "12", "--seed", "6"]
    arguments += ["--category", "simple_python", "--category", "irrelevance"]
    found = project.json("eval", "bfcl", *arguments, seconds=400)
    assert (found["baseline"], found["best"]) == ("agent@0", "agent@1")
    assert found["gain"]["difference"] == 0.5
    assert found["gain"]["low"] > 0
    rows = {
        (row["version"], row["category"]): (row["right"], row["entries"]) for row in found["details"]["by_category"]
    }
    assert rows == {
        ("agent@0", "simple_python"): (0, 12),
        ("agent@1", "simple_python"): (12, 12),
        ("agent@0", "irrelevance"): (12, 12),
        ("agent@1", "irrelevance"): (12, 12),
    }
    assert found["gain"]["against_failed"] == 1
    (kept,) = store.tunings.page("eval")
    assert kept.result == found
    proxy.settled()
    runs = store.trajectories.page(1000)
    assert {run.purpose for run in runs} == {"eval"}
    assert {f"bfcl/{BROKEN}", "bfcl/irrelevance_0"} & {run.task for run in runs}


@pytest.mark.clients
def test_conversations_over_several_turns_are_played_with_the_packages_own_tools(store: Store, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    project = Project(tmp_path / "project")
    project.write(model="agent", store=f"sqlite:///{tmp_path / 'store.db'}")
    with _served(Conversing, store, tmp_path) as (engine, proxy):
        arguments = ["--environment", str(ENVIRONMENT), "--proxy", proxy.url, "--limit", "4", "--seed", "2"]
        found = project.json("eval", "bfcl", *arguments, "--category", "multi_turn_base", seconds=400)
        proxy.settled()
    rows = {row["version"]: (row["right"], row["entries"], row["broken"]) for row in found["details"]["by_category"]}
    assert rows == {"agent@0": (0, 4, 0), "agent@1": (4, 4, 0)}
    assert isinstance(engine, Conversing)
    assert engine.results, "the package's tools answered"
    runs = [run for run in store.trajectories.page(1000) if run.version == 1]
    assert {run.purpose for run in runs} == {"eval"}
    turns = [len(store.trajectories.read(run.id).calls) for run in runs]
    assert max(turns) > 2, "the calls of a conversation are one trajectory"


def test_what_is_missing_or_would_be_trained_is_refused_with_the_remedy(tmp_path: Path) -> None:
    project = Project(tmp_path)
    missing = project.run("eval", "bfcl", "policy@0", "--environment", "nowhere")
    assert missing.returncode == 1
    assert "run `ratchet eval bfcl --setup`" in missing.stdout
    assert "name a version, policy@0" in project.run("eval", "bfcl", "policy").stdout
    project.write(agents={"mail": {}, "chat": {}})
    assert "choose one with --model NAME" in project.run("eval", "bfcl").stdout


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of it")
    with pytest.raises(TrainerError, match=r"work is not empty and not a virtual environment: .*--environment"):
        set_up(folder)
    assert (folder / "thesis.txt").read_text() == "years of it"
