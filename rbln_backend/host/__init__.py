"""Host resources: cores, memory, locks, trusted files and process ends."""
