"""One of several processes of one trainer, as `accelerate launch` starts it in tests; the settings are JSON."""

from __future__ import annotations

import json
import logging
import sys

from ratchet.trainer.controller_service.controller_process import run
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer.in_process_learner import run_with_learner

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    settings = TrainerSettings(**json.loads(sys.argv[1]))
    sys.exit(run_with_learner(lambda make_learner: run({settings.model: settings}, make_learner)))
