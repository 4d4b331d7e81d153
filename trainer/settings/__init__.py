"""Settings of the trainer: pydantic models that are parsed once at the start. Imports no torch."""
