"""The dialects that agents speak: each reads its requests, and words its answers, around one inner call to vLLM."""
