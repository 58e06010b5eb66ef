"""A step on the way to ``libdevice``."""
