"""The commands of `python -m client`, one a file."""
