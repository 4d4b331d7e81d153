"""A project with a running proxy, a model that follows the system prompt, a reflection model, and a task set."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

from ratchet.store.store import Store, open_store
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import Json, ScriptedVllm
from tests.harness.proxy.scripts import text_of
from tests.harness.proxy.servers import served
from tests.harness.tuner import prompt_world

AGENT = "tests.harness.tuner.world_agent"


class PromptedVllm(ScriptedVllm):
    """Answers questions of the small world by the rules in the system prompt, after `seconds`."""

    def __init__(self, seconds: float = 0.0, **given: Any) -> None:
        super().__init__(**given)
        self.seconds = seconds
        self.prompts: list[str] = []  # the system prompt of each call, "" where there was none

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        await asyncio.sleep(self.seconds)
        messages: list[dict[str, Any]] = body["messages"]
        prompt = text_of(messages[0]) if messages[0]["role"] == "system" else ""
        self.prompts.append(prompt)
        reply = prompt_world.answer(prompt, text_of(*(messages[1:] or messages)))
        await super()._answer(body, {**script, "say": reply}, receive, send)


@dataclass
class PromptProject:
    """A project with a proxy, a model that follows the system prompt, and a reflection model."""

    project: Project
    store: Store
    vllm: PromptedVllm
    proxy: Proxy
    reflection: ScriptedReflectionModel

    def arguments(self, agent: str = "agent", **given: Any) -> list[str]:
        options = {
            "tasks": "world", "workflow": f"{AGENT}:{agent}", "judge": f"{AGENT}:judge", "seed": 1,
            "reflection-url": self.reflection.base_url, "reflection-model": "scripted-reflection", "max_rollouts": 200,
            **given,
        }  # fmt: skip
        return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    def tune(self, agent: str = "agent", *more: str, **given: Any) -> Any:
        """Run the command to its end."""
        return self.project.run("tune", "prompt", *self.arguments(agent, **given), *more, seconds=180)

    def swapped(self) -> set[str]:
        """The system prompts that the model saw."""
        return set(self.vllm.prompts)


@contextlib.contextmanager
def prompt_project(project: Project, reflection: ScriptedReflectionModel | None = None) -> Iterator[PromptProject]:
    """Serve the models and the proxy for the block."""
    vllm = PromptedVllm()
    folder = project.folder / "world"
    folder.mkdir()
    for split, rows in (("train", prompt_world.rows(18)), ("test", prompt_world.rows(12, start=100))):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(vllm))
        store = open_store(str(project.folder / "s.db"))
        stack.callback(store.close)
        proxy = stack.enter_context(running(url, store, project.folder, model="policy"))
        served_reflection = stack.enter_context(reflection or ScriptedReflectionModel())
        project.write(store="sqlite:///s.db", tuner={"proxy_url": proxy.url})
        yield PromptProject(project, store, vllm, proxy, served_reflection)
