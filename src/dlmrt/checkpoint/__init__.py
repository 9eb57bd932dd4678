"""Checkpoints in Hugging Face layout: find (hub), read (load), write (save)."""
