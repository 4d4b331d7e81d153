"""A project with a model_list and nothing else: no base model, no vLLM, and no proxy until a run starts one.

`follows-rules` answers questions of the small world by the rules in its system prompt, `right-95` and `right-20` answer
sums, `hangs` answers nothing, `reflection` proposes prompts. All are scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from tests.harness.chat_models import ScriptedModel, ScriptedReflectionModel, adding_models, entry
from tests.harness.cli.project import Project
from tests.harness.proxy.servers import served
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_project import PromptedVllm

TASKS = 20
WORLD_AGENT = "tests.harness.tuner.world_agent"


@dataclass
class HostedProject:
    """The project and the scripted servers of its models."""

    project: Project
    follower: PromptedVllm
    sums: ScriptedModel
    reflection: ScriptedReflectionModel

    @property
    def is_at_rest(self) -> bool:
        """Whether no process of the project runs."""
        return not list((self.project.state / "run").glob("*.pid")) and not self.project.running()


@contextlib.contextmanager
def hosted_project(project: Project, *, has_base_model: bool = False) -> Iterator[HostedProject]:
    """Serve the models for the block. `has_base_model`: the project could start a scripted vLLM as well."""
    if has_base_model:
        engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
        project.content["vllm"] |= engine
    else:
        project.content = {"min_free_disk_mb": 1, "proxy": project.content["proxy"]}
    follower, folder = PromptedVllm(base="follows-rules"), project.folder
    with contextlib.ExitStack() as stack:
        reflection = stack.enter_context(ScriptedReflectionModel())
        sums = stack.enter_context(adding_models())
        models = [
            entry(stack.enter_context(served(follower)), "follows-rules"),
            *(entry(sums.url, name) for name in ("right-95", "right-20")),
            entry(stack.enter_context(served(_hanging)), "hangs"),
            entry(reflection.base_url, "reflection"),
        ]
        _write(folder / "world", train=prompt_world.rows(18), test=prompt_world.rows(12, start=100))
        _write(folder / "sums", test=[_sum(number) for number in range(TASKS)])
        project.write(model_list=models)
        yield HostedProject(project, follower, sums, reflection)


def _sum(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + 3?", "answer": str(number + 3)}


def _write(folder: Path, **splits: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def _hang(request: Request) -> Any:
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)


_hanging = Starlette(routes=[Route("/v1/chat/completions", _hang, methods=["POST"])])
