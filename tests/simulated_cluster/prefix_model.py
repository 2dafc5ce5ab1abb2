"""A model whose KV is a hash of the prefix and whose next token is a function of all of it, run by the plans' letter.

A cell of a block holds the hash of all ids up to it, of the weights and, as it is stored, of the pool's layout. A token
is a hash of all cells in front of it, read through the block table: whatever is wrong, stale, of another prompt, of
other weights or of another layout in any of them gives another token, and from there on another text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from replicas.kv.block_digests import DIGEST_BYTES
from replicas.model.model_runner import StepHandle
from replicas.sampling.sampled_tokens import NOT_A_TOKEN
from scheduler.generation_spec import GenerationSpec
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.pool_limits import PoolLimits
from tests.scheduler.paged_model import PagedRunner

VOCAB_SIZE = 1 << 20
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Weights:
    """version: of the weights: the same give the same texts. layout: of the pool: KV goes to alike ones only."""

    version: int
    layout: int = 0

    @property
    def key(self) -> int:
        """What the layout makes of a number when it is stored."""
        return self.layout * 0x5DEECE66D5DEECE6

    @property
    def fingerprint(self) -> str:
        return f"weights=w{self.version} config=c tokenizer=t dtype=float32 kv=l{self.layout}"


def _cell(before: int, token_id: int, position: int) -> int:
    return hash((before, token_id, position))


def _token(cells: tuple[int, ...], seed: int, choice: int) -> int:
    return hash((cells, seed, choice)) % VOCAB_SIZE


def _noise(spec: GenerationSpec, choice: int) -> tuple[int, int]:
    """Greedy choices are all the same."""
    return (spec.sampling.seed, choice) if spec.sampling.temperature else (0, 0)


def answer(spec: GenerationSpec, choice: int, version: int) -> tuple[tuple[int, ...], str]:
    """What this choice should be, by the weights, and why it ends."""
    cells: list[int] = []
    before = version
    for position, token_id in enumerate(spec.prompt_ids):
        before = _cell(before, token_id, position)
        cells.append(before)
    tokens: list[int] = []
    while len(tokens) < spec.max_tokens:
        token_id = _token(tuple(cells), *_noise(spec, choice))
        tokens.append(token_id)
        if token_id in spec.stop_token_ids:
            return tuple(tokens), "stop"
        before = _cell(before, token_id, len(cells))
        cells.append(before)
    return tuple(tokens), "length"


class PrefixRunner(PagedRunner):
    """As `replicas.model.model_runner.ModelRunner` for an engine's thread. A launched step may run at any time until
    its tokens are wanted, as on a card.

    row_breaks: asked for each token; whether it is no number.
    """

    def __init__(
        self,
        weights: Weights,
        limits: PoolLimits,
        max_blocks: int,
        num_host_blocks: int,
        rng: random.Random,
        row_breaks: Callable[[], bool],
    ) -> None:
        super().__init__(limits, max_blocks, num_host_blocks)
        self.weights, self._key = weights, weights.key
        self._rng, self._row_breaks = rng, row_breaks
        self._late: list[LateStep] = []
        for block in self.blocks:  # what lies in memory at the start is nobody's
            block[:] = [rng.getrandbits(62) for _ in block]

    def prepare_thread(self, max_tokens: int) -> None:
        pass

    def finish(self) -> None:
        """All that was launched has run."""
        while self._late:
            self._late[0].run()

    def read_ahead(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepHandle:
        step = LateStep(plan, self._run_first)
        self._late.append(step)
        if self._rng.random() < 0.5:
            self.finish()
        return step

    def _run_first(self, wanted: LateStep) -> None:
        """Up to this one, in their order."""
        while wanted in self._late:
            step = self._late.pop(0)
            step.output = self._broken(self.run(step.plan))

    def _broken(self, output: StepOutput) -> StepOutput:
        if not output.tokens or not self._row_breaks():
            return output
        victim = self._rng.choice(output.tokens)
        return replace(
            output, tokens=tuple(t._replace(token_id=NOT_A_TOKEN) if t is victim else t for t in output.tokens)
        )

    def digest_blocks(self, block_ids: Sequence[int]) -> bytes:
        """As `replicas.kv.block_digests.DigestBlocks`."""
        digests = (hash(tuple(self.blocks[block_id])) & _MASK for block_id in block_ids)
        return b"".join(digest.to_bytes(DIGEST_BYTES, "little") for digest in digests)

    def _write(self, slot: int, position: int, token_id: int) -> None:
        size = self._block_size
        before = self.weights.version
        if position:
            before = self.blocks[self.table[slot][(position - 1) // size]][(position - 1) % size] ^ self._key
        block_id = self.table[slot][position // size]
        self.blocks[block_id][position % size] = _cell(before, token_id, position) ^ self._key

    def _sample(self, request_id: str, slot: int, choice: int, position: int) -> SampledToken:
        cells: list[int] = []
        for block_id in self.table[slot][: -(-position // self._block_size)]:
            cells += self.blocks[block_id]
        key, sampling = self._key, self._sampling[slot]
        noise = (sampling.seed, choice) if sampling.temperature else (0, 0)
        return SampledToken(request_id, choice, _token(tuple([cell ^ key for cell in cells[:position]]), *noise))


class LateStep(StepHandle):
    """Runs when it is wanted, if it has not run before."""

    def __init__(self, plan: StepPlan, run: Callable[[LateStep], None]) -> None:
        super().__init__(plan)
        self._run = run
        self.output: StepOutput | None = None

    @property
    def is_running(self) -> bool:
        return True

    def run(self) -> None:
        self._run(self)

    def result(self) -> StepOutput:
        self.run()
        assert self.output is not None
        return self.output
