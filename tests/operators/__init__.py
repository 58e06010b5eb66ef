"""Tests of what operators get: dashboards, rules and alerts, with a real Prometheus."""
