"""The school: groups, judges, learns, gates and publishes policies.

Promises that importing this package costs nothing: torch, transformers, trl and peft are imported by the modules that
compute with them, when a `Learner` is made. Meets the proxy only in the store and never imports it.
"""
