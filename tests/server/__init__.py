"""Tests of `server`: over a scripted engine in this process, and over the real server."""
