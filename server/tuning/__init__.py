"""`rbln-serve tune`: which buckets would have run what was served fastest, and whether they do."""
