"""What requests say of drafts."""
