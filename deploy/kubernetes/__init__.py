"""The Helm chart and the generator of its schema: `python -m deploy.kubernetes.generate`."""
