"""What a checkpoint's makers recommend for requests that do not say how tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from cluster.openai.body import what_is_wrong
from cluster.openai.object import Integer
from cluster.openai.sampling import SamplingFields
from cluster.user_error import ConfigError
from replicas.answer_ends import GENERATION_FILE
from replicas.checkpoint_file import checkpoint_file

if TYPE_CHECKING:
    from cluster.openai.generation_body import GenerationBody

    Body = TypeVar("Body", bound=GenerationBody)

# Those that vLLM heeds (ModelConfig.get_diff_sampling_param), under the names that requests have for them too.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_TOKENS = "max_new_tokens"


class _Recommended(SamplingFields):
    """Fields of generation_config.json, with the bounds that they have in a request."""

    max_new_tokens: Annotated[Integer, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """fields: values of request fields, by name; those that no file gives are missing, and stay as OpenAI has them.
    max_tokens: of a chat request that gives none, unless the config has a number for that; None: none is given.
    """

    fields: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def complete(self, body: Body) -> Body:
        """The body with these values in the fields that its client left out. Changes nothing in it.

        What does not go together was looked for in what the client sent, and is not looked for again. Beam search
        chooses by probability alone: its body stays as it is.
        """
        if body.use_beam_search:
            return body
        missing = {name: value for name, value in self.fields.items() if name not in body.model_fields_set}
        return body.model_copy(update=missing) if missing else body

    def described(self) -> dict[str, float]:
        """All that is given, under the names of generation_config.json."""
        return dict(self.fields) | ({} if self.max_tokens is None else {_MAX_TOKENS: self.max_tokens})


def checkpoint_defaults(folder_or_hub_id: str) -> SamplingDefaults:
    """Those in generation_config.json. Whatever else it has (do_sample, num_beams) counts no more than in vLLM: here
    a request is sampled unless it asks for temperature 0 or for beams.

    May ask the Hub. Raises ConfigError, naming the file and the field, for a value that no request may have, and
    ValueError for a file that can't be read.
    """
    content = checkpoint_file(folder_or_hub_id, GENERATION_FILE) or {}
    given: dict[str, Any] = {name: content[name] for name in (*_FIELDS, _MAX_TOKENS) if content.get(name) is not None}
    try:
        values = _Recommended.model_validate(given)
    except ValidationError as error:
        name, reason = what_is_wrong(error)
        raise ConfigError(
            f"{GENERATION_FILE} of the model: {name} {reason}, and it would hold for every request that gives none; "
            "mend the file, or leave all its sampling defaults aside by model.sampling_defaults: none"
        ) from None
    return SamplingDefaults({name: getattr(values, name) for name in _FIELDS if name in given}, values.max_new_tokens)
