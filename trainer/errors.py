"""Every error that the trainer raises on purpose, as one tree.

    TrainerError
    ├── SettingError            a setting is out of its range; the message names the field
    ├── RowError                a token row contradicts itself or does not fit the model
    ├── ScoreError              a score is not a finite number
    ├── ModelError
    │   ├── ModelNotFound       the base model is neither a folder nor a reachable hub name
    │   ├── OtherBaseModel      the alias's versions belong to another base model
    │   └── NotAModel           the folder is there, but no causal language model can be read from it
    ├── LearningError
    │   ├── NoLearningSignal    the round holds nothing that could move a weight
    │   ├── TrainingDiverged    the gradient is not finite; the step was not taken
    │   ├── OutOfMemory         a round does not fit; the message names the settings that make it smaller
    │   └── WarmStartRefused    too little to imitate, or it would forget too much
    ├── JudgeError              the judge cannot be loaded
    │   └── JudgeUnavailable     the judge's language model gave no usable answer
    ├── EngineError
    │   ├── EngineUnreachable   vLLM does not answer; asking again may help
    │   └── AdapterRefused      vLLM answered no
    ├── WorkerProcessLost             a process that trains along has ended, or met what the others did not
    ├── LeaseLost               another process leads: a trainer this alias, a tuner this run
    ├── LeaseTaken               another process has this run; the message says which, and since when
    ├── TuningError
    │   ├── TaskSetError
    │   │   ├── TaskSetNotFound   neither a file, a folder, an imported set nor a reachable hub name
    │   │   ├── SplitNotFound     the task set has no split of that name; the message names those that it has
    │   │   ├── MalformedTaskRow         a row cannot be read; the message names file and line
    │   │   ├── TaskSetEmpty      the split holds no row
    │   │   └── TaskSetTooSmall   too few different tasks; the message says how many are needed
    │   ├── WorkflowError       the workflow cannot be loaded or called
    │   │   └── WorkflowFailed  one run of it failed: exit code, time-out, an answer that is none
    │   ├── LessonsRefused      nothing failed, or lessons cannot be tried now; the message says what could
    │   ├── TooManyFailures     more rollouts failed than max_failures allows
    │   └── PromptError
    │       ├── OptimizerMissing  the extra of an optimiser is not installed; the message has the pip command
    │       ├── BudgetTooSmall  the budget cannot come to a result; the message says what could
    │       ├── BudgetExceeded     the next step is not allowed any more; what was found is kept
    │       ├── SeedPromptUnknown     there is no prompt to begin from
    │       ├── ReflectionUnavailable  the reflection model answers nothing usable
    │       └── SetAside        one prompt cannot go on; the search can
    │           ├── Unjudged    the judge gave no score for some of its rollouts
    │           ├── Unanswered  the reflection model proposed nothing this time
    │           └── PromptRefused  the prompt is empty or too long
    └── CheckpointError
        ├── CheckpointExists    a checkpoint is immutable and the folder is taken
        ├── CheckpointUnwritable  the disk is full or refuses the write; nothing half-written is left
        ├── CheckpointDamaged   the folder is not a complete checkpoint
        └── CheckpointMismatch  the checkpoint belongs to another model or other LoRA settings

Messages name the setting, file or row, and the remedy. Foreign errors (OSError, those of transformers) are translated
where they are met and kept as the cause.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Anything that the trainer refuses or cannot do."""


class SettingError(TrainerError):
    """A setting is out of its range."""


class RowError(TrainerError):
    """A token row contradicts itself or does not fit the model."""


class ScoreError(TrainerError):
    """A score is not a finite number."""


class ModelError(TrainerError):
    """The base model cannot be used."""


class ModelNotFound(ModelError):
    """The base model is neither a folder nor a reachable hub name."""


class NotAModel(ModelError):
    """The folder is there, but no causal language model can be read from it."""


class OtherBaseModel(ModelError):
    """The alias's versions belong to another base model; the message names both."""


class LearningError(TrainerError):
    """A round could not be learnt from."""


class NoLearningSignal(LearningError):
    """The round holds nothing that could move a weight."""


class TrainingDiverged(LearningError):
    """The gradient is not finite; the step was not taken."""


class OutOfMemory(LearningError):
    """A round does not fit into memory."""


class WarmStartRefused(LearningError):
    """Too little to imitate, or general ability would suffer more than is allowed."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class CheckpointExists(CheckpointError):
    """A checkpoint is immutable and the folder is taken."""


class CheckpointUnwritable(CheckpointError):
    """The disk is full or refuses the write; nothing half-written is left."""


class CheckpointDamaged(CheckpointError):
    """The folder is not a complete checkpoint."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model or other LoRA settings."""


class JudgeError(TrainerError):
    """The judge cannot be loaded, or its signature is not one."""


class JudgeUnavailable(JudgeError):
    """The judge's language model gave no usable answer, however often it was asked."""


class EngineError(TrainerError):
    """vLLM did not do what it was asked."""


class EngineUnreachable(EngineError):
    """vLLM does not answer, or fails; asking again may help."""


class AdapterRefused(EngineError):
    """vLLM answered and refused the adapter; asking again does not help."""


class WorkerProcessLost(TrainerError):
    """A process that trains along has ended, or met an error that the others did not."""


class LeaseLost(TrainerError):
    """Another process leads: a trainer this alias, a tuner this run."""


class LeaseTaken(TrainerError):
    """Another process has what was asked for, and renews its lease."""


class TuningError(TrainerError):
    """The tuner cannot do what it was asked."""


class TaskSetError(TuningError):
    """A task set cannot be used."""


class TaskSetNotFound(TaskSetError):
    """The source is neither a file, a folder, an imported set nor a reachable hub name."""


class SplitNotFound(TaskSetError):
    """The task set has no split of that name."""


class MalformedTaskRow(TaskSetError):
    """A row of the task set cannot be read."""


class TaskSetEmpty(TaskSetError):
    """The split holds no row."""


class TaskSetTooSmall(TaskSetError):
    """A method needs more different tasks."""


class WorkflowError(TuningError):
    """The workflow cannot be loaded or called."""


class WorkflowFailed(WorkflowError):
    """One run of the workflow failed."""


class LessonsRefused(TuningError):
    """There is nothing to learn from, or lessons cannot be tried now."""


class EvaluationStopped(TrainerError):
    """An evaluation had to end before its end, since the trainer does."""


class TooManyFailures(TuningError):
    """More rollouts failed than `max_failures` allows; what ran is kept."""


class PromptError(TuningError):
    """The prompt cannot be tuned."""


class OptimizerMissing(PromptError):
    """The package of an optimiser is not installed."""


class BudgetTooSmall(PromptError):
    """The budget cannot come to a result."""


class BudgetExceeded(PromptError):
    """The next step is not allowed any more; what was found so far is kept."""


class SeedPromptUnknown(PromptError):
    """There is no prompt to begin from."""


class ReflectionUnavailable(PromptError):
    """The reflection model gave no usable answer, several questions in a row."""


class SetAside(PromptError):
    """One prompt cannot go on; the search can."""


class Unjudged(SetAside):
    """The judge gave no score for some rollouts of a prompt."""


class Unanswered(SetAside):
    """The reflection model gave no usable answer this time."""


class PromptRefused(SetAside):
    """A proposed prompt is empty or longer than it may be."""
