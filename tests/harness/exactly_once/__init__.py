"""The exactly-once campaign: every process of a training loop is killed again and again."""
