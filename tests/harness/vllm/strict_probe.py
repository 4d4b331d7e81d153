"""Prints as JSON which requests vLLM's own tool parser constrains by a grammar.

    python -m tests.harness.vllm.strict_probe MODEL

The requests are on stdin: a mapping from names to fields. VLLM_ENFORCE_STRICT_TOOL_CALLING counts as for the server.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Read the requests, run the parser, print the results."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.tool_parsers import ToolParserManager

    class Parser(DelegatingParser):
        tool_parser_cls = ToolParserManager.get_tool_parser("hermes")
        reasoning_parser_cls = None

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    messages = [{"role": "user", "content": "Find it"}]
    current: dict[str, bool] = {}
    body: dict[str, dict[str, Any]] = json.load(sys.stdin)
    for name, fields in body.items():
        request = ChatCompletionRequest(model="m", messages=messages, **fields)
        current[name] = bool(Parser(tokenizer, request.tools).adjust_request(request).structured_outputs)
    print(json.dumps(current))


if __name__ == "__main__":
    main()
