"""MIPRO, from the package `dspy` (MIPROv2): instructions proposed from the data, then a Bayesian search over them.

For DSPy the agent is a module with one predictor whose instructions are the system prompt; running it runs our
rollouts. No demonstration is added to the prompt, because the agent is not changed. Training tasks that the seed
prompt solves are examples for the proposals. DSPy's language model is our reflection model; its cache and its output
are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise the import fetches prices from the network

import dspy
import optuna
from dspy.lm15 import Message, Request, Response, Usage

from ratchet.trainer.errors import SetAside, TuningError, Unjudged
from ratchet.tuner.prompts.optimizer import Evaluate, Reflection, Search, unwrap_errors, wrap_errors

_MAX_CANDIDATES: Final = 10
_TRIALS_PER_CANDIDATE = 1.5
_BATCH_SIZE = 8  # training tasks evaluated batch
_SOLVED = 1e-9  # a task with a higher score may be an example
_NO_PROMPT = "(The assistant has no instructions yet.)"


class Mipro:
    """Runs `dspy.MIPROv2` over our trials."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search; see PromptOptimizer."""
        candidates, trials = _sizes(search)
        for library in ("dspy", "optuna"):
            logging.getLogger(library).setLevel(logging.ERROR)
        # Silence DSPy's output, but not that of an agent or of other threads in this process.
        own = sys.stdout, sys.stderr
        with unwrap_errors(), _output(_OfOtherThreads(sys.stdout), _OfOtherThreads(sys.stderr)), _quiet_dspy():
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
    """The agent as a DSPy module: its predictor holds the system prompt and is never called."""

    def __init__(self, seed_prompt: str, evaluate: Evaluate, search: Search, output: tuple[TextIO, TextIO]) -> None:
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature("task -> answer", seed_prompt or _NO_PROMPT))
        self.batch = _Batch(seed_prompt, self.predict.signature.instructions, evaluate, search, output)

    def forward(self, task_id: str, task: str) -> Any:
        """Score one task with the current instructions."""
        score, answer = self.batch.run(self.predict.signature.instructions, task_id)
        prediction = dspy.Prediction(answer=answer, score=score)
        if dspy.settings.trace is not None:  # while examples are collected
            dspy.settings.trace.append((self.predict, {"task": task}, dspy.Prediction(answer=answer)))
        return prediction


class _Batch:
    """Evaluates several tasks batch although DSPy requests them one by one. Copies of the module share it."""

    def __init__(
        self, seed: str, seed_instructions: str, evaluate: Evaluate, search: Search, output: tuple[TextIO, TextIO]
    ) -> None:
        self._seed = seed
        self._seed_instructions = seed_instructions
        self._evaluate = evaluate
        self._search = search
        self._output = output

    def __deepcopy__(self, memo: dict[int, Any]) -> _Batch:
        return self

    def run(self, instructions: str, task_id: str) -> tuple[float, str]:
        """Return the score of a task and its transcript."""
        prompt = self._seed if instructions == self._seed_instructions else instructions
        with wrap_errors(), _output(*self._output):
            batch = self._batch_of(task_id)
            scores = self._evaluate.scores_or_none(prompt, batch)
            known = [score for score in scores if score is not None]
            if not known:
                raise Unjudged("the judge scored no rollout of a prompt")
            score = scores[batch.index(task_id)]
            example = self._evaluate.example(prompt, task_id)
        # An unjudged task gets the mean of the others, so that it does not change the mean of the prompt.
        return sum(known) / len(known) if score is None else score, example.transcript

    def _batch_of(self, task_id: str) -> Sequence[str]:
        if task_id in self._search.validation:
            return self._search.validation
        start = self._search.train.index(task_id) // _BATCH_SIZE * _BATCH_SIZE
        return self._search.train[start : start + _BATCH_SIZE]


class _Engine:
    """The reflection model as DSPy's engine: one request, one answer."""

    def __init__(self, reflection: Reflection) -> None:
        self._reflection = reflection

    def complete(self, request: Request) -> Response:
        """Return the answer to a chat."""
        system = request.system if isinstance(request.system, str) else "".join(_texts(request.system or ()))
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": str(one.role), "content": one.text or ""} for one in request.messages]
        with wrap_errors():
            try:
                text = self._reflection.chat(messages, request.config.temperature)
            except SetAside as unanswered:
                raise TuningError(f"the reflection model (tuner.reflection): {unanswered}") from unanswered
        usage = Usage(input_tokens=0, output_tokens=0, total_tokens=0)  # the reflection model counts tokens
        answer = Message.assistant(text)
        return Response(id=None, model=request.model, message=answer, finish_reason="stop", usage=usage)

    def close(self) -> None:
        """Release nothing."""


def _texts(parts: Sequence[Any]) -> list[str]:
    return [part.text for part in parts]


def _sizes(search: Search) -> tuple[int, int]:
    """Return (candidates, trials) within the budget."""
    trials = max(2, (search.rollouts - len(search.train)) // len(search.validation) - 1)
    candidates = max(2, min(_MAX_CANDIDATES, int(trials / _TRIALS_PER_CANDIDATE)))
    return candidates, min(trials, int(candidates * _TRIALS_PER_CANDIDATE) + 1)


def _example(evaluate: Evaluate, task_id: str) -> Any:
    return dspy.Example(task_id=task_id, task=evaluate.text(task_id)).with_inputs("task_id", "task")


def _score(example: Any, prediction: Any, trace: Any = None) -> Any:
    """DSPy's metric: the score, or, while examples are collected, whether the task was solved."""
    return prediction.score > _SOLVED if trace is not None else prediction.score


class _OfOtherThreads:
    """A stream without what the thread that makes it writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._silenced = threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text of another thread."""
        return len(text) if threading.get_ident() == self._silenced else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _output(out: Any, errors: Any) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        yield


@contextlib.contextmanager
def _quiet_dspy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
