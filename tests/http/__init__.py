"""Tests of the HTTP edge: over a scripted engine in this process, and over the real server."""
