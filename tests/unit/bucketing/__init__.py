"""Buckets, chunks, the record of sizes and the tuner."""
