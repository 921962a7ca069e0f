"""The processes of a run on this machine: their commands, GPUs, start and recovery."""
