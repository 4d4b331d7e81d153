"""What the controller decides: groups, judgements, advantages, rounds. No processes, no torch."""
