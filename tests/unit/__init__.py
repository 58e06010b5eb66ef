"""Tests of single modules, without an engine or a server."""
