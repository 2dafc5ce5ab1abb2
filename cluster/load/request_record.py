"""What became of one request, and the field's latency metrics of it.

scheduled -- sent ---------- token 0 --- token 1 --- ... --- last token -- ended
    late -->|---- TTFT -------->|-- ITL -->|                      |         |
            |                   |------- TPOT x (tokens - 1) ---->|         |
            |---------------------------- E2E ----------------------------->|
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds on the monotonic clock, as bytes were received. error None: it succeeded.

    token_times_s: of each streamed event that carried tokens; empty when the answer was not streamed.
    num_input_tokens, num_output_tokens: as the server counted them; if it does not say, what was asked for and the
    number of events with tokens. num_cached_tokens: of the prompt, as the server says; None: it does not.
    output_ids: the answer's tokens, where the server was asked to return them.
    """

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_wanted_tokens: int = 0
    num_cached_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """How long after its time it was sent: the client's fault, not the server's."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without a stream."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, averaged over the request; None for a single token."""
        if not self.token_times_s or self.num_output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events that carried tokens. An event may carry several tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: until the answer was complete, its [DONE] included."""
        return self.ended_s - self.sent_s

    def meets(self, goodput: dict[str, float]) -> bool:
        """Whether it succeeded within all limits, seconds by "ttft", "tpot", "e2el"; what it has not, it meets."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        found = ((values[name], limit_s) for name, limit_s in goodput.items())
        return self.is_ok and all(value is None or value <= limit_s for value, limit_s in found)
