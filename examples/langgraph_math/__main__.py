"""The agent as a program, one question a run: the task as JSON on stdin, the answer on stdout."""

import asyncio
import json
import os
import sys

from examples.langgraph_math.agent import solve

if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin)["question"], os.environ["OPENAI_MODEL"])))
