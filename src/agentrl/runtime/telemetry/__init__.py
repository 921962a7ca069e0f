"""What a process reports about itself: metrics, trackers, blocked event loops."""
