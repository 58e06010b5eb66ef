"""What workers leave for the API process."""
