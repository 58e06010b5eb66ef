"""The engine's process: configuration, socket, watch, and what a dying rank does."""
