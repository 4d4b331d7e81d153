"""MIPRO, from the package `dspy` (MIPROv2): instructions proposed from the data, then a Bayesian search over them.

To DSPy the agent is a module of one predictor whose instructions are the system prompt; running it runs our rollouts,
and no demonstration is put into the prompt, since the agent stays as it is. Training tasks that the seed prompt solves
serve as examples for the proposals. DSPy's language model is our reflection; its cache and its output are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else an import asks the network for prices

import dspy
import optuna
from dspy.lm15 import Message, Request, Response, Usage

from ratchet.trainer.errors import ReflectionUnavailable, SetAside, Unjudged
from ratchet.tuner.prompts.optimizer import Evaluate, Reflection, Search, carried_out, taken_up

_MOST_CANDIDATES: Final = 10
_TRIALS_PER_CANDIDATE = 1.5
_TOGETHER = 8  # training tasks that are tried at once
_SOLVED = 1e-9  # a score above it may serve as an example
_NO_PROMPT = "(The assistant has no instructions yet.)"


class Mipro:
    """Runs `dspy.MIPROv2` over our trials."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search; see PromptOptimizer."""
        candidates, trials = _sizes(search)
        for library in ("dspy", "optuna"):
            logging.getLogger(library).setLevel(logging.ERROR)
        # DSPy draws bars and prints; the agent's own output, where it runs in this process, is let through.
        own = sys.stdout, sys.stderr
        with taken_up(), open(os.devnull, "w") as nowhere, _output(nowhere, nowhere), _quiet_dspy():
            model = dspy.LM("reflection/ratchet", engine=_Engine(reflection), cache=False, num_retries=0)
            agent = _Agent(seed_prompt, evaluate, search, own)
            optimizer = dspy.MIPROv2(
                metric=_score,
                prompt_model=model,
                task_model=model,
                auto=None,
                num_candidates=candidates,
                max_bootstrapped_demos=0,
                max_labeled_demos=0,
                num_threads=1,
                max_errors=len(search.train) + len(search.validation),
                seed=search.seed,
            )
            optimizer.compile(
                agent,
                trainset=[_example(evaluate, task) for task in search.train],
                valset=[_example(evaluate, task) for task in search.validation],
                num_trials=trials,
                minibatch=False,
                program_aware_proposer=False,
                seed=search.seed or None,
            )


class _Agent(dspy.Module):
    """The agent as DSPy sees it: its predictor holds the system prompt and is never called."""

    def __init__(self, seed_prompt: str, evaluate: Evaluate, search: Search, output: tuple[TextIO, TextIO]) -> None:
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature("task -> answer", seed_prompt or _NO_PROMPT))
        self.whole = _Whole(seed_prompt, self.predict.signature.instructions, evaluate, search, output)

    def forward(self, task_id: str, task: str) -> Any:
        """Score one task under the instructions of the moment."""
        score, answer = self.whole.run(self.predict.signature.instructions, task_id)
        prediction = dspy.Prediction(answer=answer, score=score)
        if dspy.settings.trace is not None:  # where examples are gathered
            dspy.settings.trace.append((self.predict, {"task": task}, dspy.Prediction(answer=answer)))
        return prediction


class _Whole:
    """Runs sets of tasks at once, since DSPy asks for them one by one. Copies of the module share it."""

    def __init__(
        self, seed: str, seed_instructions: str, evaluate: Evaluate, search: Search, output: tuple[TextIO, TextIO]
    ) -> None:
        self._seed = seed
        self._seed_instructions = seed_instructions
        self._evaluate = evaluate
        self._search = search
        self._output = output

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        return self

    def run(self, instructions: str, task_id: str) -> tuple[float, str]:
        """Return the score of a task, and what the agent did."""
        prompt = self._seed if instructions == self._seed_instructions else instructions
        with carried_out(), _output(*self._output):
            together = self._together(task_id)
            scores = self._evaluate.judged(prompt, together)
            known = [score for score in scores if score is not None]
            if not known:
                raise Unjudged("the judge scored no rollout of a prompt")
            score = scores[together.index(task_id)]
            example = self._evaluate.example(prompt, task_id)
        # What the judge could not score is left out of the prompt's mean.
        return sum(known) / len(known) if score is None else score, example.course

    def _together(self, task_id: str) -> Sequence[str]:
        if task_id in self._search.validation:
            return self._search.validation
        start = self._search.train.index(task_id) // _TOGETHER * _TOGETHER
        return self._search.train[start : start + _TOGETHER]


class _Engine:
    """The reflection model as DSPy's engine: one request, one answer."""

    def __init__(self, reflection: Reflection) -> None:
        self._reflection = reflection

    def complete(self, request: Request) -> Response:
        """Return the answer to a chat."""
        system = request.system if isinstance(request.system, str) else "".join(_texts(request.system or ()))
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": str(one.role), "content": one.text or ""} for one in request.messages]
        with carried_out():
            try:
                text = self._reflection.say(messages, request.config.temperature)
            except SetAside as unanswered:
                raise ReflectionUnavailable(f"the reflection model (tuner.reflection): {unanswered}") from unanswered
        usage = Usage(input_tokens=0, output_tokens=0, total_tokens=0)  # counted by the reflection itself
        answer = Message.assistant(text)
        return Response(id=None, model=request.model, message=answer, finish_reason="stop", usage=usage)

    def close(self) -> None:
        """Nothing is held."""


def _texts(parts: Sequence[Any]) -> list[str]:
    return [part.text for part in parts]


def _sizes(search: Search) -> tuple[int, int]:
    """Return (candidates, trials) that the budget allows."""
    trials = max(2, (search.rollouts - len(search.train)) // len(search.validation) - 1)
    candidates = max(2, min(_MOST_CANDIDATES, int(trials / _TRIALS_PER_CANDIDATE)))
    return candidates, min(trials, int(candidates * _TRIALS_PER_CANDIDATE) + 1)


def _example(evaluate: Evaluate, task_id: str) -> Any:
    return dspy.Example(task_id=task_id, task=evaluate.text(task_id)).with_inputs("task_id", "task")


def _score(example: Any, prediction: Any, trace: Any = None) -> Any:
    """DSPy's metric; where examples are gathered it is asked whether the task was solved."""
    return prediction.score > _SOLVED if trace is not None else prediction.score


@contextlib.contextmanager
def _output(out: TextIO, errors: TextIO) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        yield


@contextlib.contextmanager
def _quiet_dspy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
