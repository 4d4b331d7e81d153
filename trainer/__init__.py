"""The trainer: collects and judges trajectories, trains adapters and releases policy versions.

Importing the package is cheap: torch, transformers, trl and peft are imported when a `Learner` is created. The trainer
never imports the proxy; they share only the store.
"""
