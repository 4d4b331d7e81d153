"""tuner/prompts."""
