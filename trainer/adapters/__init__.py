"""Adapters: checkpoint folders, base model files, and vLLM's control API (`vllm_api.py`, the only caller of it)."""
