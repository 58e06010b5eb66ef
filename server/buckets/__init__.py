"""Changes of the compiled sizes while the service answers, by request or by the advice."""
