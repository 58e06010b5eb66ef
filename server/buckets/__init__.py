"""Changes of the compiled sizes while the service answers: by request, and by the tuner's advice."""
