"""How the contexts of a decode step's rows are cut into pieces of like length, each for one program on the GPU.

Decided on the GPU, from the rows' positions: a captured graph fits any lengths, and no step waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# So many programs fit a processor at once (tiles of 64 keys of 128 16-bit numbers).
_PROGRAMS_A_PROCESSOR = 5
# So many rows fill the processors with fewer programs too, of larger tiles: 4 to 6 % faster for mixed contexts (H200).
_MANY_ROWS = 96


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions"])
def _share_out(
    positions,
    shares,
    num_rows,
    num_resident,
    num_numbers,
    ROWS_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
) -> None:
    """One piece: its row, first tile and end; and the number of pieces before the row of the same number, and that
    row's counts."""
    piece = tl.program_id(0)
    rows = tl.arange(0, ROWS_PADDED)
    position = tl.load(positions + rows, mask=rows < num_rows, other=-1)
    tiles = (position + BLOCK_N) // BLOCK_N  # none in a padding row
    total, longest = tl.sum(tiles, 0), tl.max(tiles, 0)
    num_used = tl.sum((tiles > 0).to(tl.int32), 0)
    # Few rows: about as many pieces as run at once. Many of about one length: left whole. Else small enough pieces.
    is_few = num_used * 4 < num_resident * 3
    is_even = longest * num_used * 4 <= total * 5
    most = tl.where(
        is_few, tl.cdiv(total, num_resident), tl.where(is_even, longest, tl.cdiv(2 * total, 5 * num_resident))
    )
    counts = tl.cdiv(tiles, tl.maximum(most, 1))
    ends = tl.cumsum(counts, 0)
    is_before = ends <= piece
    row = tl.sum(is_before.to(tl.int32), 0)
    part = piece - tl.sum(tl.where(is_before, counts, 0), 0)
    count = tl.maximum(tl.sum(tl.where(rows == row, counts, 0), 0), 1)  # 0 behind the last piece
    num_tiles = tl.sum(tl.where(rows == row, tiles, 0), 0)
    tl.store(shares + piece * 4, row)
    tl.store(shares + piece * 4 + 1, part * num_tiles // count)
    tl.store(shares + piece * 4 + 2, (part + 1) * num_tiles // count)
    tl.store(shares + piece * 4 + 3, tl.sum(tl.where(rows < piece, counts, 0), 0))
    heads = tl.arange(0, HEADS_PADDED)
    places = count_places(shares, num_numbers, piece, heads, NUM_KV_HEADS)
    tl.store(places, 0, mask=(heads < NUM_KV_HEADS) & (piece < num_rows))


@triton.jit
def count_places(shares, num_numbers, row, heads, NUM_KV_HEADS: tl.constexpr):
    """Where it is counted how many of a row's pieces are done, for each KV head. num_numbers: of shares, in all."""
    return shares + (num_numbers - 1 - row * NUM_KV_HEADS - heads)


@dataclass(frozen=True, slots=True)
class WorkSharing:
    """How the contexts of a step's rows are cut into pieces. num_resident: pieces, of a program for each KV head, that
    run at once. short_tile, long_tile: keys of a tile in steps of few and of many rows. most_rows: of any step;
    most_drafting: of one with drafts.
    """

    num_kv_heads: int
    num_resident: int
    short_tile: int
    long_tile: int
    most_rows: int
    most_drafting: int = 0

    @classmethod
    def of(
        cls,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_processors: int,
        most_rows: int,
        most_drafting: int = 0,
    ) -> WorkSharing:
        num_resident = max(1, _PROGRAMS_A_PROCESSOR * num_processors // num_kv_heads)
        short, long = (32, 32) if dtype.itemsize > 2 or head_dim > 128 else (64, 128)
        return cls(num_kv_heads, num_resident, short, long, most_rows, most_drafting)

    @property
    def rows_at(self) -> int:
        """The line of `shares` from which on there is room for what rows with drafts are (`RowQueries`)."""
        return self.most_rows + 5 * self.num_resident // 2 + 2

    def tile_len(self, num_rows: int) -> int:
        """Keys of a tile in a step of so many rows; a piece is some tiles."""
        return self.long_tile if num_rows >= _MANY_ROWS else self.short_tile

    def most_pieces(self, num_rows: int) -> int:
        """No step of so many rows has more."""
        # Pieces beyond one a row are full ones, and all of these are no longer than all contexts.
        is_few = num_rows * 4 < self.num_resident * 3
        return num_rows + max(1, self.num_resident if is_few else 5 * self.num_resident // 2)

    def empty_shares(self, device: torch.device) -> torch.Tensor:
        """Room for what `share_out` gives: int32 [n, 4], n always the same."""
        num_counting = triton.cdiv(self.most_rows * self.num_kv_heads, 4)
        return torch.empty(self.rows_at + self.most_drafting + num_counting, 4, dtype=torch.int32, device=device)

    def share_out(self, positions: torch.Tensor, shares: torch.Tensor | None = None) -> torch.Tensor:
        """The pieces of a step, the same for all of its layers: int32 [n, 4], n always the same.

        Of piece i: row, first tile, end; then the number of pieces before row i. Behind the last piece come empty ones;
        what is behind `most_pieces` is undefined, but for zeros at the end, backwards, of each row's KV heads, in which
        pieces are counted (`count_places`). positions: int32 [R], -1 for a padding row. shares: to be written, and
        returned; None: new ones. Does not block.
        """
        num_rows = positions.shape[0]
        shares = self.empty_shares(positions.device) if shares is None else shares
        _share_out[(self.most_pieces(num_rows) + 1,)](
            positions, shares, num_rows, self.num_resident, shares.numel(),
            ROWS_PADDED=triton.next_power_of_2(max(self.most_rows, 2)), BLOCK_N=self.tile_len(num_rows),
            NUM_KV_HEADS=self.num_kv_heads, HEADS_PADDED=triton.next_power_of_2(self.num_kv_heads),
        )  # fmt: skip
        return shares
