"""Publishing: from a checkpoint on disk to a version that every replica serves, and old ones out again."""
