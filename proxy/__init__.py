"""The front door: serves the OpenAI API, forwards to vLLM, remembers every call. Never trains, never imports torch."""
