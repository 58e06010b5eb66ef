"""The commands `rbln-serve serve|batch|check|compile|fetch|cache|tune`."""
