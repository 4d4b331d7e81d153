"""The tuner, on a real proxy where it needs one."""
