"""`rbln-serve tune`: its sources, its search, and what it prints."""
