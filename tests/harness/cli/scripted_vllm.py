"""A scripted API server of vLLM without a model, started, called and ended like the real one.

Answers /health and /v1/models. Starts a helper in a separate session, as detached from its parent as an engine process
can be, and writes the helper's pid into $SCRIPTED_VLLM_HELPER. $SCRIPTED_VLLM selects a fault: `dies_at_start` or
`ignores_sigterm`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    arguments, _ = parser.parse_known_args()
    script = os.environ.get("SCRIPTED_VLLM", "")
    print("scripted vLLM: loading weights", flush=True)
    if script == "dies_at_start":
        sys.exit("RuntimeError: the scripted weights do not fit")
    if script == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_helper(stubborn=script == "ignores_sigterm")
    serve(arguments.port, arguments.served_model_name)


def start_helper(*, stubborn: bool) -> None:
    """Start a process in a session of its own."""
    file = os.environ.get("SCRIPTED_VLLM_HELPER")
    if file:
        ignore = "signal.signal(15, signal.SIG_IGN); " if stubborn else ""
        helper = subprocess.Popen(
            [sys.executable, "-c", f"import signal, time; {ignore}time.sleep(300)"], start_new_session=True
        )
        Path(file).write_text(str(helper.pid))


def serve(port: int, model: str) -> None:
    """Answer the two routes that a start needs."""

    class ModelListHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", port), ModelListHandler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
