"""The command line: `rbln-serve serve|check|compile|fetch|cache|tune`."""
