"""Gradients: what travels (buckets, header) and how (one file per transport)."""
