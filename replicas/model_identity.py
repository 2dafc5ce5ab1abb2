"""What two replicas must have in common: to exchange KV all of it, to continue each other's streams all but the layout.

As text in replica metadata and handoffs, `weights=... config=... tokenizer=... dtype=... scheme=... kv=...`: equal ones
can work together, and of unlike ones people see what differs. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Digests of what is loaded, a word each. scheme: what weights and activations are rounded to, empty where they
    are not. kv: the pool's layout, empty where it does not matter.
    """

    weights: str
    config: str
    tokenizer: str
    dtype: str
    scheme: str = ""
    kv: str = ""

    def __str__(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return " ".join(f"{name}={value}" for name, value in parts if value)

    @staticmethod
    def parse(text: str) -> ModelIdentity:
        """Of a text that `str` made; of any other, one that equals nobody else's."""
        parts = dict(part.split("=", 1) for part in text.split() if "=" in part)
        if parts.keys() - {"scheme", "kv"} != {"weights", "config", "tokenizer", "dtype"}:
            return ModelIdentity(text, "", "", "")
        return ModelIdentity(**parts)

    def differences(self, other: ModelIdentity) -> tuple[str, ...]:
        """Names of the parts that differ."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


class UnlikeModels(Exception):
    """KV never goes from one to the other; the message names what differs."""


def refuse_unlike(fingerprint: str, other: str) -> None:
    """Raises UnlikeModels unless they are equal."""
    if fingerprint != other:
        parts = ModelIdentity.parse(fingerprint).differences(ModelIdentity.parse(other))
        raise UnlikeModels(f"it has another model or layout: unlike {', '.join(parts)}")


def model_of(fingerprint: str) -> str:
    """The text of all but the layout: who shares it gives the same answers."""
    return fingerprint.partition(" kv=")[0]
