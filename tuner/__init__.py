"""Tuner: compares models, tunes prompts and weights on task sets, and reports what each method gained."""
