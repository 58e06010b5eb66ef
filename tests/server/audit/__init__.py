"""The audit log: its chain and files, its writer, and what is recorded of an answer."""
