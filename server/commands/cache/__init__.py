"""`rbln-serve cache`: the compile cache from the command line."""
