"""How long tests wait for what has to happen."""

PATIENCE = 240.0
"""Seconds: no promise of speed, only an end for what never happens. A second suite beside this one, or
a slow machine, makes everything take several times as long. Below the suite's limit for one test."""
