"""HTTP side and wiring: config, ingress, router, metrics, command line. Imports no torch."""
