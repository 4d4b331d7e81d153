"""A program for an environment with DSPy: runs MIPRO in the small world once per case and prints the results as JSON.

Run alone: `python mipro_in_the_small_world.py REFLECTION_URL`, with Ratchet's tests on the path.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.tuner.prompts.optimizer import load_optimizer
from ratchet.tuner.prompts.reflection_model import ReflectionModel
from ratchet.tuner.prompts.trials import Budget
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_fakes import WorldEvaluate, search

NOBODY = "http://127.0.0.1:9/v1"  # no server listens here


def run(
    url: str, evaluate: WorldEvaluate, tokens: int | None = None, answered: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Search once; return the result. `answered` holds the answers of an earlier run."""
    result: list[dict[str, Any]] = []
    spec = ModelSpec(base_url=url, model="scripted-reflection", max_attempts=2)
    budget = Budget(1000, tokens)
    model = LanguageModel(spec, None, sleep=lambda seconds: None)
    reflection = ReflectionModel(
        model, budget, answered=answered, keep=lambda one, judge_requests: result.append(dict(one))
    )
    error = None
    try:
        load_optimizer("mipro").optimize(prompt_world.SEED, evaluate, reflection, search())
    except Exception as raised:  # noqa: BLE001  the tests check it
        error = type(raised).__name__
    score, prompt = evaluate.best()
    return {
        "score": score,
        "prompt": prompt,
        "paid": evaluate.paid,
        "reflections": budget.reflections,
        "error": error,
        "questions": evaluate.questions,
        "answered": result,
    }


def main(url: str) -> None:
    """Print the cases."""
    warnings.simplefilter("error")
    print("not part of the answer", file=sys.stderr)
    ended, printed = threading.Event(), itertools.count()

    def print_meanwhile() -> None:
        while not ended.wait(0.02):
            print("meanwhile", next(printed), file=sys.stderr)

    thread = threading.Thread(target=print_meanwhile)
    thread.start()
    whole = run(url, WorldEvaluate())
    ended.set()
    thread.join()
    cases = {
        "meanwhile": next(printed),
        "whole": whole,
        "again": run(NOBODY, WorldEvaluate(), answered=whole["answered"]),
        "budget": run(url, WorldEvaluate(most=30)),
        "tokens": run(url, WorldEvaluate(), tokens=1500),
        "unjudged": run(url, WorldEvaluate(unjudged=lambda prompt, task: "quib" in prompt and task == "task10")),
        "down": run(NOBODY, WorldEvaluate()),
    }
    print(json.dumps(cases | {"imported": sorted(sys.modules)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
