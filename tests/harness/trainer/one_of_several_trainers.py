"""One of several processes of one trainer, as `accelerate launch` starts it in tests; the settings are JSON."""

from __future__ import annotations

import json
import logging
import sys

from ratchet.trainer.process import run
from ratchet.trainer.settings.trainer_settings import TrainerSettings

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(run(TrainerSettings(**json.loads(sys.argv[1]))))
