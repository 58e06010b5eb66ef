"""The command line: `rbln-serve serve|batch|check|compile|fetch|cache|tune`."""
