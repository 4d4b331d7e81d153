"""The vLLM plug-in that loads adapters from the adapter store by name. It needs fsspec and no other part of Ratchet."""
