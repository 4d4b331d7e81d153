"""A project with a running proxy, other models in its `model_list`, and a task set of sums."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.store.store import Store, open_store
from tests.harness.chat_models import ScriptedModel, adding_models, entry
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served

MODELS = ("right-95", "right-90", "right-20", "crash")
PRICES = {
    "right-95": {"input_cost_per_token": 1e-5, "output_cost_per_token": 1e-5},
    "right-90": {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-6},
}
TASKS = 20


@dataclass
class ModelProject:
    """The project, its store, and the server of the other models."""

    project: Project
    store: Store
    models: ScriptedModel
    proxy_url: str


@contextlib.contextmanager
def model_project(project: Project) -> Iterator[ModelProject]:
    """Serve the models and the proxy for the block."""
    folder = project.folder / "sums"
    folder.mkdir()
    rows = [{"question": f"What is {number} + 3?", "answer": str(number + 3)} for number in range(TASKS)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.ExitStack() as stack:
        models = stack.enter_context(adding_models())
        vllm = stack.enter_context(served(ScriptedVllm()))
        store = open_store(str(project.folder / "s.db"))
        stack.callback(store.close)
        listed = [entry(models.url, name, PRICES.get(name)) for name in MODELS]
        proxy = stack.enter_context(running(vllm, store, project.folder, model="policy", model_list=listed))
        project.write(store="sqlite:///s.db", model_list=listed, tuner={"proxy_url": proxy.url})
        yield ModelProject(project, store, models, proxy.url)
