"""The front process: its application, routes, metrics and life."""
