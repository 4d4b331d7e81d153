def too_long(length: int, limit: int) -> str:
    """Return how vLLM refuses a prompt."""
    told = f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens"
    return f"{told}, which exceeds this limit even without any output tokens. (parameter=input_tokens, value={length})"
