"""Metrics and predictions of all ranks together."""
