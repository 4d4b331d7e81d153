"""Learning from groups, from a noisy ranking without ground truth, and from single rollouts, at equal budget.

Each way is a run of the demo on the real vLLM (`ratchet demo`), with the same seed, tasks and number of rollouts:

    grouped  each task is tried 8 times at once; the rule that knows the answer scores
    ranked   the same traffic; RULER asks a scripted ranking model that is wrong about 15% of the attempts
    single   each task is tried once at a time, so that no groups come about; the rule scores; a running baseline

    python -m benchmarks.advantages [--ways grouped,ranked,single] [--rounds 14] [--seed 1] [--folder DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.tasks import judge
from ratchet.demo.run import Demo, DemoOptions
from ratchet.supervisor import signals

NOISE = 0.15  # of the attempts are called the other way round
_JITTER = 0.05  # a model never gives two attempts quite the same score
_TASKS, _ATTEMPTS = 16, 8  # per round; single rollouts use one task each


Right = Callable[[list[Mapping[str, Any]]], bool]  # whether an attempt reached its goal


def answered(messages: list[Mapping[str, Any]]) -> bool:
    """Whether the attempt gave the right answer."""
    return bool(judge({"messages": messages})["score"] > 0.5)


def opinion(messages: list[Mapping[str, Any]], is_right: Right) -> float:
    """Return the score that the scripted model gives an attempt: mostly right, the same whenever it is asked."""
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
    wrong = digest[0] / 256 < NOISE
    right = is_right(messages)
    return (0.85 if right != wrong else 0.1) + _JITTER * digest[1] / 256


def ranking(question: str, is_right: Right) -> str:
    """Return the scripted model's answer to RULER's question."""
    shown = json.loads(question)
    scores = [
        {
            "trajectory_id": attempt["trajectory_id"],
            "explanation": "scripted",
            "score": opinion([*shown["shared_beginning"], *attempt["messages"]], is_right),
        }
        for attempt in shown["attempts"]
    ]
    return json.dumps({"scores": scores})


class _Model(BaseHTTPRequestHandler):
    is_right: Right

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": ranking(body["messages"][1]["content"], type(self).is_right)}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def ranking_model(is_right: Right = answered) -> Iterator[str]:
    """The URL of the scripted ranking model."""
    handler = type("_Asked", (_Model,), {"is_right": staticmethod(is_right)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def options(way: str, url: str, rounds: int, seed: int, folder: Path) -> DemoOptions:
    """Return the run of one way."""
    changes: dict[tuple[str, ...], Any] = {}
    tasks, attempts = _TASKS, _ATTEMPTS
    if way == "ranked":
        changes = {("trainer", "judge"): {"kind": "ruler", "base_url": url, "model": "scripted"}}
    elif way == "single":
        changes = {("trainer", "ungrouped"): "baseline", ("trainer", "group_wait_seconds"): 0.5}
        tasks, attempts = _TASKS * _ATTEMPTS, 1
    return DemoOptions(
        seed=seed, rounds=rounds, tasks_per_round=tasks, attempts=attempts, state_dir=folder / way, changes=changes
    )


def main() -> None:
    """Run the ways one after the other; print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="grouped,ranked,single")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".ratchet/credit"))
    chosen = parser.parse_args()
    signals.install_handlers()
    with ranking_model() as url:
        for way in chosen.ways.split(","):
            figures = Demo(options(way, url, chosen.rounds, chosen.seed, chosen.folder)).play()
            before, after = figures["before"]["sampled"], figures["after"]["sampled"]
            result = {
                "way": way, "seed": chosen.seed, "before": before["success"], "after": after["success"],
                "gain": after["success"] - before["success"], "low": after["low"], "high": after["high"],
                "seconds": figures["seconds_total"],
                **{name: figures[name] for name in ("swaps", "tokens_trained", "dropped")},
            }  # fmt: skip
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
