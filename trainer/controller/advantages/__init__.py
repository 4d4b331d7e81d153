"""Advantages: from the verdicts of a group to the advantage of each member."""
