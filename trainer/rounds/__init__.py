"""Training rounds: which groups a round takes, and the round itself."""
