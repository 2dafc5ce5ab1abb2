"""Ready, draining, the end: of an ingress, of a node, of the whole server."""
