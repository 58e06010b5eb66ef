"""`rbln-serve check`, `cache` and the command line itself."""
