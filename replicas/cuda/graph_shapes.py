"""Which passes get a CUDA graph of their own: sizes of batch, and shapes of prompts; others are padded to the next."""

from __future__ import annotations

from replicas.cuda.graph_passes import PromptShape
from replicas.pool_size import CHUNK_MULTIPLE

# Lengths of fresh prompts without rows; then, by the number of rows that there is room for, lengths of chunks that may
# be anywhere in a prompt, and of fresh prompts. Between them prompts are padded.
# 2304: what a step of that many tokens, as configs for cards have it, has room for. Each graph takes 0.1 s of a start.
_ALONE = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304)
_BESIDE_ROWS = (
    (32, (64, 256, 512, 1024, 1536, 2304), (768, 1024, 1536, 2048)),
    (128, (64, 512, 2304), (1024, 2048)),
)
# Of prompts in steps without rows: lengths of chunks that may be anywhere, and fresh ones as above.
_ANYWHERE_ALONE = (64, 256, 512, 1024, 1536, 2304)
# Chunks where long prompts are cut (`chunk_multiple`), by how many tokens are in front of them: `attend_behind`.
_EARLIER = tuple(range(CHUNK_MULTIPLE, 8 * CHUNK_MULTIPLE, CHUNK_MULTIPLE))


def batch_sizes(largest: int) -> list[int]:
    """Sizes of batch that get a graph of their own, ascending; others are padded to the next."""
    # 224 and 240 rows take a library's products longer than 256 do, 208 take them 8 % less (Llama-3.1-8B, H200).
    sizes = {1, 2, 4, 8, *range(16, 209, 16), *range(256, largest, 32)}
    return sorted({*(size for size in sizes if size < largest), largest})


def prompt_shapes(most_rows: int, longest: int, *, has_fresh: bool) -> list[PromptShape]:
    """Shapes of prompt passes that get a graph, those of the fewest tokens first.

    most_rows: of any step; longest: prompt; has_fresh: whether a library kernel may compute fresh prompts.
    """
    shapes = [PromptShape(0, length, is_fresh=True) for length in _ALONE]
    for num_rows, anywhere, fresh in _BESIDE_ROWS:
        room = min(num_rows, most_rows)
        shapes += [PromptShape(room, length, is_fresh=False) for length in anywhere]
        shapes += [PromptShape(room, length, is_fresh=True) for length in fresh]
    kept = {shape for shape in shapes if shape.length <= longest and (has_fresh or not shape.is_fresh)}
    kept |= set(_shapes_behind(longest)) if has_fresh else set()
    return sorted(kept, key=lambda shape: (shape.num_tokens, shape.num_rows, not shape.is_fresh, shape.num_earlier))


def lone_prompt_shapes(longest: int, *, has_fresh: bool) -> list[PromptShape]:
    """As `prompt_shapes`, of passes that never have rows beside them."""
    fresh = [PromptShape(0, length, is_fresh=True) for length in _ALONE if has_fresh]
    anywhere = [PromptShape(0, length, is_fresh=False) for length in _ANYWHERE_ALONE]
    kept = [shape for shape in fresh + anywhere if shape.length <= max(longest, min(_ANYWHERE_ALONE))]
    kept += _shapes_behind(longest) if has_fresh else []
    return sorted(kept, key=lambda shape: (shape.num_tokens, not shape.is_fresh, shape.num_earlier))


def _shapes_behind(longest: int) -> list[PromptShape]:
    """Of chunks of prompts of up to so many tokens that have some of the library's in front."""
    earlier = [num_tokens for num_tokens in _EARLIER if num_tokens < longest]
    return [PromptShape(0, CHUNK_MULTIPLE, is_fresh=False, num_earlier=num_tokens) for num_tokens in earlier]
