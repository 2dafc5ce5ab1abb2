"""HTTP: the app and its middleware, bodies in, answers and events out, the published schema.

Begin with `app.py`.
"""
