"""What ``python -m torchbearer_ddp`` offers besides ``run``: one module per command."""
