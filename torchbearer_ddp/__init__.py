"""Data-parallel training for torchbearer: add callbacks to a Trial, start it on any number of ranks."""

__version__ = "0.1.0"
