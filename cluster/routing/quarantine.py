"""Requests that replicas have died of: they are refused, so that a client that sends one again kills no further ones.

Which request it was is known by how it was tried (`AttemptHistory.num_deaths`, `scheduler.suspects`): the last time as
the only suspect of its replica. Others that died with it have got past their first row since, and are none.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from replicas.messages import GenerationSpec

logger = logging.getLogger(__name__)

_KEPT_S = 600.0  # then it may try again: what it died of may have been mended
_MOST = 1024


class Quarantine:
    """One for each router, on its event loop; routers do not tell each other. clock: monotonic seconds."""

    def __init__(self, metrics: IngressMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._until_s: dict[bytes, float] = {}  # by digest, in the order in which they came

    def check(self, spec: GenerationSpec) -> None:
        """Raises ApiError for one that is as one that was found before."""
        if not self._until_s:
            return
        until_s = self._until_s.get(_digest(spec))
        if until_s is not None and self._clock() < until_s:
            self._metrics.rejected("quarantined")
            raise _error("replicas have died of a request like this one; it is not tried again for now")

    def found(self, spec: GenerationSpec, generation_id: str, num_deaths: int) -> ApiError:
        """It is one of those: what its client is told. Mutates; counts and logs it."""
        self._metrics.rejected("quarantined")
        extra = {"event": "request_quarantined", "generation": generation_id, "num_deaths": num_deaths}
        extra |= {"prompt_tokens": spec.prompt_len, "for_s": _KEPT_S}
        logger.error("a request is not tried again: replicas die of it", extra=extra)
        self._until_s[_digest(spec)] = self._clock() + _KEPT_S
        if len(self._until_s) > _MOST:
            del self._until_s[next(iter(self._until_s))]
        return _error(
            f"{num_deaths} replicas have died while they computed this request, the last one with no other suspect; it "
            f"is not tried again; the server's log has more under {generation_id}"
        )


def _error(message: str) -> ApiError:
    return ApiError(500, message, code="quarantined", is_final=True)


def _digest(spec: GenerationSpec) -> bytes:
    """Of what is computed, whoever asks for it: the prompt, and how tokens are chosen; but for the seed, which most
    clients leave to chance."""
    rest = (replace(spec.sampling, seed=0), spec.beam, spec.grammar, len(spec.choices), spec.max_tokens)
    digest = hashlib.blake2b(array("q", spec.prompt_ids).tobytes(), digest_size=16)
    digest.update(repr(rest).encode())
    return digest.digest()
