"""OpenAI's objects: requests as they come, answers as they go.

Begin with `generation_service.py`, which makes a running generation of a body.
"""
