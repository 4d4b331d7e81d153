"""AgentScope's tuner on Ratchet, for code that is written for it: the plug-in's package under this name."""

import sys
from typing import TYPE_CHECKING

from ratchet.store.errors import plugin_hint
from ratchet.trainer.errors import PluginError

if TYPE_CHECKING:
    from ratchet_agentscope import *  # noqa: F403  its names are those of this module

try:
    import ratchet_agentscope
except ModuleNotFoundError as error:
    raise PluginError(f"{error} in {sys.prefix}: {plugin_hint('agentscope')}") from error

sys.modules[__name__] = ratchet_agentscope
