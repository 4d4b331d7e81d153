"""Runs in bfcl-eval's own environment: generates and evaluates with the package, one model, some entries.

    python program.py < asked.json > found.json          environment: OPENAI_BASE_URL, OPENAI_API_KEY, BFCL_PROJECT_ROOT

Asked: model, categories, limit (entries of each category; null: all), seed, threads, temperature, tools (whether tools
go by the API's own field). Each call carries `x-ratchet-task`. What the package prints goes to standard error. Imports
nothing of Ratchet and promises nothing beyond what the package says, but for one thing: an entry whose inference broke
is marked as broken, where the package would count it as right in a category in which no call is the right answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

NAME = "candidate"  # what the package files the model under
BROKEN = "Error during inference"


def main() -> None:
    sys.path.pop(0)  # nothing of this folder is meant by what the package imports
    asked: dict[str, Any] = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        entries = run(asked)
    json.dump({"entries": entries}, sys.stdout)


def run(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the package found, entry by entry."""
    from bfcl_eval import _llm_response_generation as generation
    from bfcl_eval.constants.eval_config import TEST_IDS_TO_GENERATE_PATH
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
    from bfcl_eval.eval_checker import eval_runner
    from bfcl_eval.utils import parse_test_category_argument

    MODEL_CONFIG_MAPPING[NAME] = ModelConfig(
        model_name=asked["model"], display_name=NAME, url="", org="", license="", model_handler=handler(),
        is_fc_model=asked["tools"], underscore_to_dot=asked["tools"],
    )  # fmt: skip
    categories = parse_test_category_argument(asked["categories"])
    ids = {category: chosen(category, asked["limit"], asked["seed"]) for category in categories}
    TEST_IDS_TO_GENERATE_PATH.write_text(json.dumps(ids))
    generation.main(
        argparse.Namespace(
            model=[NAME],
            test_category=categories,
            temperature=asked["temperature"],
            include_input_log=False,
            exclude_state_log=True,
            num_threads=asked["threads"],
            num_gpus=0,
            backend="vllm",
            gpu_memory_utilization=0.0,
            result_dir=None,
            run_ids=True,
            allow_overwrite=True,
            skip_server_setup=True,
            local_model_path=None,
            lora_modules=None,
            enable_lora=False,
            max_lora_rank=None,
        )
    )
    eval_runner.main([NAME], categories, None, None, partial_eval=True)
    return [entry for category in categories for entry in found(category)]


def handler() -> Any:
    """Return the package's own OpenAI handler, which says with each call what it is for."""
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    class Handler(OpenAICompletionsHandler):
        current = threading.local()

        def inference(self, test_entry: Any, include_input_log: bool, exclude_state_log: bool) -> Any:
            self.current.task = f"bfcl/{test_entry['id']}"
            return super().inference(test_entry, include_input_log, exclude_state_log)

        def generate_with_backoff(self, **asked: Any) -> Any:
            return super().generate_with_backoff(**asked, extra_headers={"x-ratchet-task": self.current.task})

    return Handler


def chosen(category: str, limit: int | None, seed: int) -> list[str]:
    """Return the ids of a category's entries, or of a sample that is the same for the same seed."""
    from bfcl_eval.utils import load_dataset_entry

    ids = [entry["id"] for entry in load_dataset_entry(category, include_prereq=False)]
    return ids if limit is None or limit >= len(ids) else sorted(random.Random(seed).sample(ids, limit))


def found(category: str) -> list[dict[str, Any]]:
    """Return the entries of a category as the package's result and score files tell them."""
    from bfcl_eval.constants.eval_config import RESULT_PATH, SCORE_PATH

    wrong = {line["id"]: line for line in lines(SCORE_PATH, f"*_{category}_score.json") if "id" in line}
    entries = []
    for line in lines(RESULT_PATH, f"*_{category}_result.json"):
        said = line["result"]
        broken = said if isinstance(said, str) and said.startswith(BROKEN) else None
        entries.append(
            {
                "id": line["id"],
                "category": category,
                "valid": broken is None and line["id"] not in wrong,
                "broken": broken,
                "error": wrong.get(line["id"], {}).get("error_type"),
                "prompt_tokens": total(line.get("input_token_count")),
                "seconds": total(line.get("latency")),
                "completion_tokens": total(line.get("output_token_count")),
            }
        )
    return entries


def lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the JSON lines of the one file that fits."""
    return [json.loads(line) for file in folder.rglob(pattern) for line in file.read_text().splitlines() if line]


def total(counted: Any) -> float:
    """Return the sum of a number, or of nested lists of numbers."""
    return sum(map(total, counted)) if isinstance(counted, list) else float(counted or 0)


if __name__ == "__main__":
    main()
