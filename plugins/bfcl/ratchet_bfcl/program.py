"""Runs in the virtual environment of bfcl-eval: generates and evaluates some entries with one model.

    python program.py < request.json > result.json       environment: OPENAI_BASE_URL, OPENAI_API_KEY, BFCL_PROJECT_ROOT

Request: model, categories, limit (entries per category; null: all), seed, threads, temperature, tools (whether tools
use the API field). Each call carries `x-ratchet-task`. The package's output goes to standard error. Imports nothing of
Ratchet. Results are those of the package, except that an entry whose inference failed is marked as broken: the package
would count it as correct in categories where no call is expected.
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

NAME = "candidate"  # model name in the package's files
BROKEN = "Error during inference"


def main() -> None:
    sys.path.pop(0)  # keep modules of this folder out of the package's imports
    request: dict[str, Any] = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        entries = run(request)
    json.dump({"entries": entries}, sys.stdout)


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the result of each entry."""
    from bfcl_eval import _llm_response_generation as generation
    from bfcl_eval.constants.eval_config import TEST_IDS_TO_GENERATE_PATH
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
    from bfcl_eval.eval_checker import eval_runner
    from bfcl_eval.utils import parse_test_category_argument

    MODEL_CONFIG_MAPPING[NAME] = ModelConfig(
        model_name=request["model"], display_name=NAME, url="", org="", license="", model_handler=handler(),
        is_fc_model=request["tools"], underscore_to_dot=request["tools"],
    )  # fmt: skip
    categories = parse_test_category_argument(request["categories"])
    ids = {category: chosen(category, request["limit"], request["seed"]) for category in categories}
    TEST_IDS_TO_GENERATE_PATH.write_text(json.dumps(ids))
    generation.main(
        argparse.Namespace(
            model=[NAME],
            test_category=categories,
            temperature=request["temperature"],
            include_input_log=False,
            exclude_state_log=True,
            num_threads=request["threads"],
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
    """Return the package's OpenAI handler, with the task in a header of each call."""
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    class TaskHeaderHandler(OpenAICompletionsHandler):
        current = threading.local()

        def inference(self, test_entry: Any, include_input_log: bool, exclude_state_log: bool) -> Any:
            self.current.task = f"bfcl/{test_entry['id']}"
            return super().inference(test_entry, include_input_log, exclude_state_log)

        def generate_with_backoff(self, **request: Any) -> Any:
            return super().generate_with_backoff(**request, extra_headers={"x-ratchet-task": self.current.task})

    return TaskHeaderHandler


def chosen(category: str, limit: int | None, seed: int) -> list[str]:
    """Return the ids of a category's entries, or of a sample that depends only on the seed."""
    from bfcl_eval.utils import load_dataset_entry

    ids = [entry["id"] for entry in load_dataset_entry(category, include_prereq=False)]
    return ids if limit is None or limit >= len(ids) else sorted(random.Random(seed).sample(ids, limit))


def found(category: str) -> list[dict[str, Any]]:
    """Read the entries of a category from the package's result and score files."""
    from bfcl_eval.constants.eval_config import RESULT_PATH, SCORE_PATH

    wrong = {line["id"]: line for line in lines(SCORE_PATH, f"*_{category}_score.json") if "id" in line}
    entries = []
    for line in lines(RESULT_PATH, f"*_{category}_result.json"):
        answer = line["result"]
        broken = answer if isinstance(answer, str) and answer.startswith(BROKEN) else None
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
    """Return the JSON lines of the matching files."""
    return [json.loads(line) for file in folder.rglob(pattern) for line in file.read_text().splitlines() if line]


def total(counted: Any) -> float:
    """Return the sum of a number, or of nested lists of numbers."""
    return sum(map(total, counted)) if isinstance(counted, list) else float(counted or 0)


if __name__ == "__main__":
    main()
