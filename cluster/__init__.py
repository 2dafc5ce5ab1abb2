"""What runs without a GPU: HTTP, text, routing, the config and the wiring of the whole application. Imports no torch.

Begin with `serving/app.py`, which deploys it, and `http/app.py`, where a request comes in. Files beside the folders are
used by all of them.
"""
