"""Rules and adapters for the RBLN SDK; ``rebel_compiler`` imports the SDK itself."""
