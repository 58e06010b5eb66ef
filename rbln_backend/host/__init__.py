"""What the host gives: cores, memory, locks, files to be trusted, processes that end."""
