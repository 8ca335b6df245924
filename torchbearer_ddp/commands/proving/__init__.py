"""``python -m torchbearer_ddp prove``: one process and N ranks, compared step by step."""
