"""vLLM 0.26's API server for Ratchet: drops --enable-scale-out, which this release always has."""

import runpy
import sys

sys.argv = [sys.argv[0], *(argument for argument in sys.argv[1:] if argument != "--enable-scale-out")]
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
