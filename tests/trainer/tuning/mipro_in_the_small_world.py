"""A program for an environment with DSPy: MIPRO in the small world, once for each case; what came of it as JSON.

Run alone: `python -m tests.trainer.tuning.mipro_in_the_small_world REFLECTION_URL`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from tests.trainer.tuning import prompt_world
from tests.trainer.tuning.prompt_fakes import WorldEvaluate, search
from trainer.judges.language_model import LanguageModel
from trainer.judges.settings import ModelSpec
from trainer.tuning.prompt_budget import Budget
from trainer.tuning.prompt_optimizer import make_optimizer
from trainer.tuning.prompt_reflection import ReflectionModel


def run(url: str, evaluate: WorldEvaluate, tokens: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Search once; return what came of it."""
    spec = ModelSpec(base_url=url, model="scripted-reflection", attempts=2)
    budget = Budget(1000, tokens)
    reflection = ReflectionModel(LanguageModel(spec, None, sleep=lambda seconds: None), budget)
    error = None
    try:
        make_optimizer("mipro").optimize(prompt_world.SEED, evaluate, reflection, search(seed))
    except Exception as raised:  # noqa: BLE001  the tests look at it
        error = type(raised).__name__
    score, prompt = evaluate.best()
    return {
        "score": score,
        "prompt": prompt,
        "paid": evaluate.paid,
        "reflections": budget.reflections,
        "error": error,
        "questions": evaluate.questions,
    }


def main(url: str) -> None:
    """Print the cases."""
    warnings.simplefilter("error")
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "whole": lambda: run(url, WorldEvaluate()),
        "again": lambda: run(url, WorldEvaluate()),
        "budget": lambda: run(url, WorldEvaluate(most=30)),
        "tokens": lambda: run(url, WorldEvaluate(), tokens=1500),
        "unjudged": lambda: run(
            url, WorldEvaluate(unjudged=lambda prompt, task: "quib" in prompt and task == "task10")
        ),
        "down": lambda: run("http://127.0.0.1:9/v1", WorldEvaluate()),
    }
    print("not part of the answer", file=sys.stderr)
    print(json.dumps({name: case() for name, case in cases.items()} | {"imported": sorted(sys.modules)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
