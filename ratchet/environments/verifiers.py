"""Environments of the package verifiers as a workflow, `ratchet.environments.verifiers:workflow`, by the plug-in.

`PYTHON -m ratchet.environments.verifiers` is the same workflow as a program, for a Python environment of its own.
"""

import sys

from ratchet.store.errors import plugin_hint
from ratchet.trainer.errors import PluginError

try:
    from ratchet_verifiers import main, workflow
except ModuleNotFoundError as error:
    raise PluginError(f"{error} in {sys.prefix}: {plugin_hint('verifiers')}") from error

__all__ = ["workflow"]

if __name__ == "__main__":
    main()
