"""Reports of a step about requests: times to first token, progress of prompts."""
