"""Ready, draining, the end."""
