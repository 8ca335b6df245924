"""Checkpoints: the file, the folder, what is saved, when, and how a run resumes."""
