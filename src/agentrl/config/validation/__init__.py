"""Rules that settings have to satisfy together, beyond the type of each."""
