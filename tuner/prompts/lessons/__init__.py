"""tuner/prompts/lessons."""
