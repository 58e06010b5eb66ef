"""The command line: `rbln-serve serve|check|compile|cache|tune`."""
