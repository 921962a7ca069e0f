"""How long tests wait for the progress of processes and loops that they started."""

PATIENCE = 240.0
"""Seconds: no promise of speed, only an end for what never happens. A second suite beside this one, or
a slow machine, makes every start take several times as long. Below the suite's limit for one test.
Not for what has to happen soon: a bound that tells right from wrong is written where it is tested."""
