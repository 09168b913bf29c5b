"""Starts, watches, restarts and stops the processes of one deployment. Nothing else: it serves no request itself."""
