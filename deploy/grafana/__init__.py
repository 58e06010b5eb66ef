"""Grafana dashboards of the service, as code: `make dashboards` writes their JSON."""
