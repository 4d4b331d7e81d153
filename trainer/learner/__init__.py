"""The learner. The only package that imports torch, TRL and PEFT."""
