"""The Helm chart: what it renders, and its times and retries against real processes."""
