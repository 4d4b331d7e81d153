"""What the tuner needs of the door: rollouts that are known by their id, and prompts that are swapped in."""
