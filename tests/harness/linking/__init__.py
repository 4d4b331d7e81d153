"""The linking campaign: agent traffic whose true trajectories are known."""
