"""The Helm chart, and what makes its schema: `python -m deploy.kubernetes.generate`."""
