"""What the picker shows of itself: metrics, structured logs, the status API."""
