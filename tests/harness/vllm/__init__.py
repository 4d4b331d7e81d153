"""tests/harness/vllm."""
