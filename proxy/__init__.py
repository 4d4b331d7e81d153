"""The proxy: serves the OpenAI API, forwards to vLLM and records every call. Never trains, never imports torch."""
