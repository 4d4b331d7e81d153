"""Resampling: further answers to recorded single-call prompts, while vLLM is idle."""
