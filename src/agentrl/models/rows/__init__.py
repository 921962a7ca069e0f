"""The layout of a row: its tree of segments, its split over ranks, its state between chunks."""
