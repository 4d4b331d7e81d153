"""Runs a notebook in a Jupyter kernel, as its user does: `python notebook.py FILE [TEXT]`.

A cell is interrupted once it has put out TEXT. Prints what each cell put out, as JSON: stdout, stderr, the shown
displays with their updates, and the error.
"""

import json
import sys

from jupyter_client import KernelManager


class Cells:
    """Runs cells one after another in one kernel of its own."""

    def __init__(self, interrupted_at):
        self.interrupted_at = interrupted_at
        self.kernel = KernelManager(kernel_name="python3")
        self.kernel.start_kernel()
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, source):
        """Return what a cell put out."""
        out = {"stdout": "", "stderr": "", "shown": [], "error": None}
        interrupted = False

        def receive(message):
            nonlocal interrupted
            content = message["content"]
            if message["msg_type"] == "stream":
                out[content["name"]] += content["text"]
            elif message["msg_type"] in ("display_data", "update_display_data", "execute_result"):
                out["shown"].append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                out["error"] = f"{content['ename']}: {content['evalue']}"
            if self.interrupted_at and not interrupted and self.interrupted_at in str(out):
                interrupted = True
                self.kernel.interrupt_kernel()

        self.client.execute_interactive(source, output_hook=receive, timeout=240)
        return out

    def close(self):
        """End the kernel."""
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


def main(file, interrupted_at=None):
    """Run the code cells up to the first error that is no interruption."""
    with open(file) as opened:
        sources = ["".join(cell["source"]) for cell in json.load(opened)["cells"] if cell["cell_type"] == "code"]
    cells, found = Cells(interrupted_at), []
    try:
        for source in sources:
            found.append(cells.run(source))
            if found[-1]["error"] and interrupted_at is None:
                break
    finally:
        cells.close()
    print("RESULT", json.dumps(found))


main(*sys.argv[1:])
