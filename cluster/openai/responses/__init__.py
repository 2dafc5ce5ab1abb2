"""OpenAI's Responses API, stateless, as a translation over the chat path: nothing is generated in another way here.

Begin with `responses_service.py`, which makes a running generation of a body.
"""
