"""What requests want of drafts: tokens that the engine checks several at a time."""
