"""Files of a model directory, read and checked before any weights are."""
