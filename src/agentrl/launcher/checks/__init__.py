"""The checks of a configuration before anything starts; each failed check is one line."""
