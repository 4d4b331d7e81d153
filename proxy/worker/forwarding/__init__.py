"""Forwards captured calls: to vLLM replicas, with exact continuation, to other models."""
