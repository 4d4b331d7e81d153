"""What runs: the rooms and vLLM as processes, from their start to their end."""
