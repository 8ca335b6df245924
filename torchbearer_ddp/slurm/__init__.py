"""Submission to a Slurm cluster through submitit."""
