"""A project with a running proxy, a model that follows the system prompt, a reflection model, and a task set."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from ratchet.store.store import Store, open_store
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.servers import served
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompted_vllm import PromptedVllm
from tests.harness.tuner.scripted_reflection_model import ScriptedReflectionModel


@contextlib.contextmanager
def prompt_project(project: Project) -> Iterator[tuple[Store, PromptedVllm, Proxy, ScriptedReflectionModel]]:
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
        reflection = stack.enter_context(ScriptedReflectionModel().running())
        project.write(store="sqlite:///s.db", tuner={"proxy_url": proxy.url})
        yield store, vllm, proxy, reflection
