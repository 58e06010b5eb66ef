"""The registry of adapters, scripted and over a real engine."""
