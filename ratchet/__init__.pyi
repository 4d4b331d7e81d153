from ratchet.api.evaluate import evaluate as evaluate
from ratchet.api.evaluate import evaluate_async as evaluate_async
from ratchet.api.evaluation import Attempt as Attempt
from ratchet.api.evaluation import Evaluation as Evaluation
from ratchet.api.runs import RunStatus as RunStatus
from ratchet.api.runs import TuningRun as TuningRun
from ratchet.api.select_model import select_model as select_model
from ratchet.api.select_model import select_model_async as select_model_async
from ratchet.api.tasks import Tasks as Tasks
from ratchet.api.try_out import TryOut as TryOut
from ratchet.api.try_out import try_judge as try_judge
from ratchet.api.try_out import try_judge_async as try_judge_async
from ratchet.api.try_out import try_out as try_out
from ratchet.api.try_out import try_out_async as try_out_async
from ratchet.api.tune import tune as tune
from ratchet.api.tune import tune_async as tune_async
from ratchet.api.tune_prompt import tune_prompt as tune_prompt
from ratchet.api.tune_prompt import tune_prompt_async as tune_prompt_async
from ratchet.errors import InvalidArgument as InvalidArgument
from ratchet.errors import RatchetError as RatchetError
from ratchet.errors import RunCancelled as RunCancelled
from ratchet.trainer.errors import JudgeError as JudgeError
from ratchet.trainer.errors import TaskSetError as TaskSetError
from ratchet.trainer.errors import TuningError as TuningError
from ratchet.trainer.errors import WorkflowError as WorkflowError
from ratchet.trainer.user_code.judgement import Judgement as Judgement
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput as WorkflowOutput

__version__: str
_MODULES: dict[str, str]
