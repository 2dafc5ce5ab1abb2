"""What is to be generated: said once, where a client's body is read, and carried whole from there to the last step."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.beam_search import BeamParams
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams

SALT_BYTES = 16  # of a cache_salt


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """1..n choices that share a prompt, and with it the prompt's KV; they differ in their noise. Or one beam search.

    A router's attempt asks for what is left of it: the same with another prompt, fewer choices and fewer tokens. A new
    field goes here, to where it is made (`cluster.openai.generation_service`), and to whoever uses it; nobody between
    these names it.

    max_tokens counts every generated token of a choice, the first included; at least 1.
    num_output_in_prompt: a replay's prompt ends with what earlier attempts have generated: so many of its last tokens
    count as output for penalties, bad words and min_tokens (the whole generation's, not this attempt's).
    beam: search with so many beams, which are the choices, 0 .. width - 1. sampling is then what `BeamParams.sampling`
    says. No token leaves before the search is over; then the num_returned best texts do, as choices 0, 1, ...

    Raises ValueError for what nobody could generate.
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    priority: int = 0  # higher is more important: it is admitted earlier and preempted later
    client: str = ""  # an opaque label, never a key: clients of the same priority share fairly
    num_output_in_prompt: int = 0
    beam: BeamParams | None = None
    num_returned: int = 0  # with beam: 1 .. its width
    grammar: Grammar | None = None  # what each choice's text must follow; not with beam
    cache_salt: bytes = b""  # whose prefixes it may find, and who may find its own: who has the same; empty: everybody
    use_cache: bool = True  # whether what others have computed may be used for it
    predicted_ids: tuple[int, ...] = ()  # what the client expects the answer to be like: drafts are looked for there

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("there is no prompt")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}")
        if not self.choices or len(set(self.choices)) != len(self.choices):
            raise ValueError(f"choices are {self.choices}")
        if len(self.cache_salt) not in (0, SALT_BYTES):
            raise ValueError(f"cache_salt has {len(self.cache_salt)} bytes, it must have {SALT_BYTES} or none")
        if self.beam is not None:
            self._check_search(self.beam)

    def _check_search(self, beam: BeamParams) -> None:
        if self.grammar is not None:
            raise ValueError("a beam search has no grammar")
        if self.choices != tuple(range(beam.width)):
            raise ValueError(f"choices of {beam.width} beams are {self.choices}")
        if not 1 <= self.num_returned <= beam.width:
            raise ValueError(f"num_returned of {beam.width} beams is {self.num_returned}")
        if (self.sampling.num_logprobs or 0) < beam.num_candidates(len(self.stop_token_ids)):
            raise ValueError("sampling has too few log-probabilities for a beam search")

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_start(self) -> int:
        """Position of the first generated token: behind the prompt, but for a replay, whose prompt ends with output."""
        return len(self.prompt_ids) - self.num_output_in_prompt

    @property
    def num_answers(self) -> int:
        """How many texts come of it: one of each choice, of a beam search the best."""
        return len(self.choices) if self.beam is None else self.num_returned
