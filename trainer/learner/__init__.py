"""Learning: token rows in, a better LoRA adapter out. The only folder that imports torch, TRL and PEFT."""
