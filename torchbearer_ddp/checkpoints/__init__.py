"""What stands behind :class:`~torchbearer_ddp.Checkpoint`: files, folder, and contents."""
