"""An OpenEnv server with one environment: two sums in a row, whose observations script the vLLM.

Run alone, in an environment with openenv: `python openenv_server.py` prints its URL.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class SumAction(Action):
    """What the agent answers."""

    answer: int  # verifiers reads a reply of digits as a number


class SumObservation(Observation):
    """The next sum."""

    text: str


class TwoSums(Environment[SumAction, SumObservation, State]):
    """Each right answer gives a reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> SumObservation:
        self._number, self._steps = int(given.get("number", 2)), 0
        return self._question(0.0)

    def step(self, action: SumAction, timeout_s: float | None = None, **given: Any) -> SumObservation:
        right = action.answer == 2 * self._number
        self._steps += 1
        return self._question(float(right))

    @property
    def state(self) -> State:
        return State(step_count=self._steps)

    def _question(self, reward: float) -> SumObservation:
        text = f"What is {self._number} + {self._number}? #say=4 now"
        return SumObservation(text=text, reward=reward, done=self._steps == 2)


def main() -> None:
    """Serve on any free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_fastapi_app(TwoSums, SumAction, SumObservation, max_concurrent_envs=8)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
