"""What the engine says of itself: progress, numbers, who its workers are, what `check` tells."""
