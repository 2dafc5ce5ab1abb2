"""What a draft model has of each sequence, and the first pass of its step: whatever it has not read of them yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.speculation.drafter import DraftRow
from replicas.speculation.history import TokenIds
from scheduler.plan import BlockCopy, Slice, SlotInit, TableWrite


@dataclass(slots=True)
class DraftedKv:
    """What the pool has of a slot's sequence: of its first num_known tokens, and behind them of drafts."""

    num_known: int = 0
    ahead: list[int] = field(default_factory=list)

    def settle(self, ids: TokenIds) -> None:
        """The sequence is this now: what is behind the first wrong draft is no longer there. The last token is always
        fed again, as what follows it is asked for. Mutates."""
        for token in self.ahead:
            if self.num_known >= len(ids) or ids[self.num_known] != token:
                break
            self.num_known += 1
        self.ahead.clear()
        self.num_known = min(self.num_known, len(ids) - 1)


@dataclass(frozen=True, slots=True)
class Chain:
    """A row that is drafted for in this step. index: among the rows. length: of its sequence, in tokens."""

    index: int
    row: DraftRow
    length: int
    num_drafts: int


@dataclass(slots=True)
class CatchUp:
    """The first pass of a step while it is put together: whatever of the sequences was not computed yet."""

    inits: list[SlotInit] = field(default_factory=list)
    writes: list[TableWrite] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    known: list[tuple[int, int, TokenIds]] = field(default_factory=list)
    rows: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)
    of_rows: list[Chain] = field(default_factory=list)
    of_chunks: list[Chain] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)  # that are computed in it, by identity
    num_tokens: int = 0  # of the chunks

    @property
    def chains(self) -> list[Chain]:
        """Those whose first draft it gives, in the order of the plan's samples."""
        return self.of_rows + self.of_chunks
