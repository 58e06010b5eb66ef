"""Changes of compiled sizes, over a scripted engine."""
