"""Averaging gradients: buckets, their header, hooks on backward, and the reducer over them."""
