"""``python -m torchbearer_ddp doctor``: hosts, links, and how fast a script is on more ranks."""
