"""What happens when more is asked than can be answered."""
