"""What requests say of drafts on its way to the engine, and what is told of it in answers."""
