"""Read-only questions about a run, for the console, the inspector and `agentrl inspect`."""
