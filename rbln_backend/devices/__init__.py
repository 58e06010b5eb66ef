"""The compiler port and the devices behind it."""
