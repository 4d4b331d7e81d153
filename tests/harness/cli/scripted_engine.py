"""A scripted vLLM that also answers calls, started like vLLM: `--port N --served-model-name NAME`."""

from __future__ import annotations

import argparse

import uvicorn

from tests.harness.proxy.scripted_vllm import ScriptedVllm


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    arguments, _ = parser.parse_known_args()
    app = ScriptedVllm(base=arguments.served_model_name)
    uvicorn.run(app, port=arguments.port, http="httptools", loop="uvloop", log_level="critical")


if __name__ == "__main__":
    main()
