"""Tests of the backend's pure parts: configuration, buckets, progress, metrics, artifact store."""
