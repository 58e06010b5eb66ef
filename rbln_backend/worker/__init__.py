"""One rank: its process, what it is put together from, and its runners."""
