"""A worker of several: asks the coordinator for the place of every call."""
