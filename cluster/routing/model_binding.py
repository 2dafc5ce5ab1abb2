"""Which model answers a request: one, for all its prompts and choices, however often its parts are tried again."""

from __future__ import annotations


class OtherModel(Exception):
    """Tokens of one model for an answer that another has begun: they are dropped, and generated again."""


class ModelBinding:
    """One for each request, on the router's event loop. model: as model_identity.model_of tells; empty: not chosen.

    Until the client has got something the choice is open: a part that finds no replica of it may choose another, and
    whoever is the first to answer decides for all.
    """

    def __init__(self) -> None:
        self.model = ""
        self.is_final = False

    def lean(self, model: str) -> None:
        """A part of the request was routed to this model. Mutates unless the choice is final."""
        if not self.is_final:
            self.model = model

    def decide(self, model: str) -> None:
        """Something that this model said is passed on to the client. Mutates. Raises OtherModel."""
        if self.is_final and model != self.model:
            raise OtherModel(f"this answer was begun by another model: {self.model}, not {model}")
        self.model, self.is_final = model, True
