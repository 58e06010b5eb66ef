"""Tests of what attackers send: nothing holds the event loop, grows without bound or breaks."""
