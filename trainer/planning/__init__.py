"""Memory of a model by formula, from its config.json alone: which settings fit which GPUs. Pure; imports no torch."""
