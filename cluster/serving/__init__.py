"""The wiring: the command line, the Ray Serve application and the ingress replica. Nobody below imports it."""
