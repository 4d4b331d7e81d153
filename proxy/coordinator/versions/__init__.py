"""Policy versions: which one serves, the draw of a version, the heartbeat, the base model check."""
