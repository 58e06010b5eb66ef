"""The RBLN SDK: rules and adapters; ``compiler`` imports the SDK itself."""
