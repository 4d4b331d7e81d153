"""Policy versions: which one serves, the canary, the heartbeat, the base model check."""
