"""Forms of quantised weights that the RBLN SDK's compiler takes."""
