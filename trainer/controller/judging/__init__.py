"""Judging: ready groups to judged groups, re-judging after late feedback, and the second judge."""
