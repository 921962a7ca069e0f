"""What a run shows on the console: its progress, panel, warnings and final report."""
