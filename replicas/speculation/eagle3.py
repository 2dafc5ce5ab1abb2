"""Drafts by an EAGLE-3 head, whose keys and values are one more layer of the served model's blocks.

Every step that computes a token computes the head's layer for it as well: so wherever a block goes, to another engine,
to host memory, into the cache, it has all that the head needs. Only what it made of a sequence's last token is kept by
slot: a sequence whose KV was read, or that has parted from its prompt's first choice, has its first drafts in its
second row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from replicas.kv.kv_pool import KvPool
from replicas.model.paged_context import PagedStep
from replicas.model.step_inputs import build_step_inputs
from replicas.model_support import UnsupportedModel
from replicas.sampling.draw import sample
from replicas.sampling.sample_place import SamplePlace, counting
from replicas.sampling.slot_state import SlotState
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.eagle3_head import Eagle3Head
from scheduler.plan import Slice, SlotInit, StepPlan


class LayerInputs:
    """What some layers of a model are given: of one thread, while it is entered. Changes nothing of it."""

    def __init__(self, model: nn.Module, num_layers: int, layer_ids: Sequence[int]) -> None:
        """layer_ids: rising, num_layers: what its last layer gives. Raises UnsupportedModel for a model without a list
        of so many layers."""
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
        if not lists:
            raise UnsupportedModel(
                f"{type(model).__name__} has no list of {num_layers} layers: no head can look into it"
            )
        self._layers, self._layer_ids = list(lists[0]), layer_ids
        self._seen = threading.local()
        for layer_id in sorted(set(layer_ids)):
            if layer_id < num_layers:
                self._layers[layer_id].register_forward_pre_hook(self._before(layer_id), with_kwargs=True)
            else:
                self._layers[-1].register_forward_hook(self._behind(layer_id))

    @contextmanager
    def kept(self) -> Iterator[dict[int, Tensor]]:
        """By layer id, [n, hidden size] of a pass's tokens."""
        self._seen.by_layer = {}
        try:
            yield self._seen.by_layer
        finally:
            self._seen.by_layer = None

    def joined(self, by_layer: dict[int, Tensor]) -> Tensor:
        """[n, layers * hidden size]"""
        return torch.cat([by_layer[layer_id] for layer_id in self._layer_ids], dim=-1)

    def _before(self, layer_id: int) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._keep(layer_id, arguments[0] if arguments else named["hidden_states"])

        return keep

    def _behind(self, layer_id: int) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._keep(layer_id, output[0] if isinstance(output, tuple) else output)

        return keep

    def _keep(self, layer_id: int, hidden: Tensor) -> None:
        by_layer = getattr(self._seen, "by_layer", None)
        if by_layer is not None:
            by_layer[layer_id] = hidden[0]


@dataclass(slots=True)
class _Pieces:
    """What the head computes in one pass: slices, rows of the step's hidden states, the tokens behind them, and by slot
    where its sequence ends among them, with the position of its last token."""

    slices: list[Slice] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    next_ids: list[int] = field(default_factory=list)
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, part: Slice, first_row: int, next_ids: Sequence[int]) -> None:
        count = len(next_ids)
        # Its place is what counts; the head is fed other tokens than these.
        known = (0,) * count if count > 1 or part.is_prompt else ()
        self.slices.append(part._replace(num_tokens=count, num_sampled=1, token_ids=known, forks=(), num_drafts=0))
        self.rows.append(torch.arange(first_row, first_row + count))
        self.next_ids += next_ids


class Eagle3Drafter:
    """A Drafter, of a runner that also has it follow each of its steps. One thread."""

    def __init__(self, head: Eagle3Head, pool: KvPool, slots: SlotState, vocab_size: int) -> None:
        """slots: the runner's, whose blocks, parameters and rules are the drafts', too. vocab_size: the served
        model's."""
        self._head, self._pool, self._slots, self._vocab_size = head, pool, slots, vocab_size
        num_slots = len(slots.sampling)
        dtype = head.fc.weight.dtype
        self._outputs = torch.zeros(num_slots, head.config.layer.hidden_size, dtype=dtype)
        self._positions: dict[int, int] = {}  # by slot: of the sequence's last token when its output was made
        self._prompts: dict[int, tuple[int, ...]] = {}

    def start(self, init: SlotInit) -> None:
        self._positions.pop(init.slot, None)

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """`follow` has seen to it."""

    def expect(self, init: SlotInit) -> None:
        """Of any sequence, with drafts or without: its prompt. Mutates."""
        self._positions.pop(init.slot, None)
        self._prompts[init.slot] = init.context.prompt_ids

    @torch.inference_mode()
    def follow(self, plan: StepPlan, states: Tensor, token_ids: Sequence[int]) -> None:
        """A step was computed, its tokens chosen: the head's layer of all of its tokens that are the sequences' own.
        plan: with its drafts. states: of its tokens, [n, 3 * hidden size]. token_ids: of all its places. Mutates the
        pool's last layer."""
        places = SamplePlace.all_of(plan)
        counts = counting(places, token_ids)
        pieces = _Pieces()
        row = sample_index = 0
        for part in plan.slices:
            num_places = part.num_sampled + len(part.forks)
            chosen = [
                max(0, token_ids[index])
                for index in range(sample_index, sample_index + part.num_sampled)
                if counts[index]
            ]
            next_ids = self._next_ids(part, chosen)
            if chosen:
                pieces.ends[part.slot] = (len(pieces.next_ids) + len(next_ids) - 1, part.start + len(next_ids))
            pieces.add(part, row, next_ids)
            row += part.num_tokens
            sample_index += num_places
        output = self._compute(pieces.slices, self._head.fused(states[torch.cat(pieces.rows)]), pieces.next_ids)
        for slot, (index, position) in pieces.ends.items():
            self._outputs[slot] = output[index]
            self._positions[slot] = position

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """As the contract has it. Mutates the pool's last layer, behind what is known."""
        width = max((row.num_drafts for row in rows), default=0)
        drafts = torch.full((len(rows), width), NO_DRAFT, dtype=torch.int64)
        lengths = {row.slot: int(self._slots.length[row.slot]) for row in rows}
        going = [index for index, row in enumerate(rows) if self._positions.get(row.slot) == lengths[row.slot]]
        outputs = self._outputs[[rows[index].slot for index in going]]
        for place in range(width):
            if not going:
                break
            tokens = self._draw(outputs, [rows[index] for index in going], lengths, place)
            drafts[going, place] = torch.tensor(tokens)
            on = [i for i, index in enumerate(going) if tokens[i] >= 0 and place + 1 < rows[index].num_drafts]
            going, tokens = [going[i] for i in on], [tokens[i] for i in on]
            if going:
                slices = [
                    Slice("", rows[index].choice, rows[index].slot, lengths[rows[index].slot] + place)
                    for index in going
                ]
                outputs = self._compute(slices, outputs[on], tokens, is_ahead=True)
        return drafts

    def _next_ids(self, part: Slice, chosen: Sequence[int]) -> list[int]:
        """The tokens behind those of a slice that are its sequence's own."""
        if not part.is_prompt:
            return list(chosen)
        if chosen:
            return [*part.token_ids[1:], chosen[0]]
        prompt = self._prompts.get(part.slot, ())
        return [*part.token_ids[1:], prompt[part.end] if part.end < len(prompt) else 0]

    def _compute(
        self, slices: Sequence[Slice], hidden: Tensor, next_ids: Sequence[int], is_ahead: bool = False
    ) -> Tensor:
        """The head's output at the slices' places. is_ahead: these are places that the model has not come to yet.
        Mutates the pool."""
        inputs = build_step_inputs(StepPlan(0, (), (), (), tuple(slices)), self._slots, self._pool.layout.block_size)
        if is_ahead:  # what nobody has computed yet may be no number
            self._pool.clear(inputs.fresh_blocks, ())
        step = PagedStep(self._pool, inputs, hidden.dtype)
        output: Tensor = self._head(hidden, torch.tensor(next_ids), inputs.positions, step)
        return output

    def _draw(self, outputs: Tensor, rows: Sequence[DraftRow], lengths: dict[int, int], place: int) -> list[int]:
        """By the rows' own parameters and rules, with the noise of the positions. NO_DRAFT where none is allowed."""
        logits = self._head.logits(outputs, self._vocab_size)
        places = [SamplePlace(row.slot, row.choice, lengths[row.slot] + 1 + place, row.slot) for row in rows]
        self._slots.rules.apply(logits, places)
        tokens = sample(logits, self._slots.sampling_batch(places))
        is_possible = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        ids = torch.where(is_possible, tokens, NO_DRAFT)
        for one, id_ in zip(places, ids.int(), strict=True):
            self._slots.rules.know(one.slot, one.position, id_.clamp(min=0)[None].numpy())
        found: list[int] = ids.tolist()
        return found
