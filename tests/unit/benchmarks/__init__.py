"""Tests of what the measuring commands compute; no engine is started and no peer needed."""
