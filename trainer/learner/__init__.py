"""The learner. The only package that imports torch and PEFT."""
