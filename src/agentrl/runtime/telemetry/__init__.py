"""What a process reports about itself: metrics, spans, trackers, blocked event loops."""
