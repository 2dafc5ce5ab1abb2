"""python -m benchmarks.gpu.logits SHAPE.json ...: whether the card's bf16 logits are as good as transformers' own.

Random weights (equal top-1 tokens say nothing then), three times the same: transformers in float32, transformers in
bf16, and this engine in bf16 with its kernels, compiled layers and graphs. --lanes 2: prompts in steps of their own, by
each share of the card. An error is |x - float32| / |float32| of one row of logits. Fails when this engine's are beyond
transformers' own by more than --slack.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from benchmarks.gpu.logits_reference import NUM_FORCED, Case, Rows, make_cases, reference_rows
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import table
from replicas.model.model_runner import ModelRunner
from replicas.pool_size import CHUNK_MULTIPLE
from scheduler.lane_split import WHOLE_CARD, LaneObjectives, LaneShare
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import SampledToken, SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

BLOCK_SIZE = 16
# With log-probabilities a step's logits go through `sample_tokens`, where they can be seen.
_SEEN = SamplingParams(temperature=0.0, num_logprobs=0)
# Graphs of prompts, prompts beyond them, a chunk that a library attends behind another one, a prompt shorter than a
# block.
_LENGTHS = (5, 1024, 100, 2048, 700, 64, 1500, 512, 4000, 300, 33, 768)


class SeenLogits:
    """Runs plans of cases one after the other and keeps every row of logits."""

    def __init__(self, runner: ModelRunner, cases: list[Case], prompts: ModelRunner | None = None) -> None:
        """prompts: what computes chunks, in steps of their own; None: runner, beside rows."""
        self._runner, self._prompts = runner, prompts
        self._cases = cases
        self.rows: Rows = {}
        self._last: list[torch.Tensor] = []
        self.num_drawn = self.num_best = 0  # tokens that the drawing kernel chose, those that have the best logit
        self._places = self._block_tables()

    def _block_tables(self) -> list[TableWrite]:
        """Block ids of neighbours interleave, so that no prompt lies in one piece."""
        counts = [num_blocks_for(len(case.ids) + 1, BLOCK_SIZE) for case in self._cases]
        order = list(range(sum(counts)))
        random.Random(11).shuffle(order)
        writes = []
        for case, count in zip(self._cases, counts, strict=True):
            writes.append(TableWrite(case.slot, 0, tuple(order[:count])))
            order = order[count:]
        return writes

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Both runners choose tokens by the same function, unless a kernel draws them; what it is given is kept."""
        module: Any = import_module(ModelRunner.__module__)
        original: Any = module.sample_tokens

        def seen(logits: torch.Tensor, *arguments: Any) -> Any:
            self._last.append(logits.float().cpu())
            return original(logits, *arguments)

        with patch.object(module, "sample_tokens", seen):
            yield

    def step(self, way: str, decoded: list[tuple[Case, int]], chunks: list[tuple[Case, int, int]]) -> None:
        """One step. decoded: (case, index of the forced token that is fed); chunks: (case, start, end)."""
        inits, writes, rows, prompts = [], [], [], []
        seen: list[tuple[int, int]] = []
        for case, index in decoded:
            inits.append(SlotInit(case.slot, 0, _SEEN, last_token=case.forced[index]))
            rows.append(Slice(f"case-{case.slot}", 0, case.slot, len(case.prompt) + index))
            seen.append((case.slot, index + 1))
        for case, start, end in chunks:
            if start == 0:
                inits.append(SlotInit(case.slot, 0, _SEEN, None))
                writes.append(self._places[case.slot])
            is_last = end == len(case.prompt)
            targets = (SampleTarget(case.slot, 0),) if is_last else ()
            prompts.append(Slice.of_prompt(f"case-{case.slot}", case.slot, start, case.prompt[start:end], targets))
            seen += [(case.slot, 0)] if is_last else []
        self._last.clear()
        self._launch(inits, writes, rows, prompts)
        if not seen:
            return
        logits = torch.cat(self._last)
        assert len(logits) == len(seen), "one row for each token"
        self.rows |= {key: (way, row.clone()) for key, row in zip(seen, logits, strict=True)}

    def _launch(
        self, inits: list[SlotInit], writes: list[TableWrite], rows: list[Slice], prompts: list[Slice]
    ) -> list[SampledToken]:
        """One step, or one of each lane; the tokens of rows first. What precedes a row is another step's."""
        if self._prompts is None:
            plan = StepPlan(0, tuple(inits), tuple(writes), (), (*rows, *prompts))
            return list(self._runner.launch(plan).result().tokens)
        slots = {row.slot for row in rows}
        tokens: list[SampledToken] = []
        for runner, slices, has_rows in ((self._runner, rows, True), (self._prompts, prompts, False)):
            own = tuple(init for init in inits if (init.slot in slots) == has_rows)
            if slices:
                plan = StepPlan(0, own, () if has_rows else tuple(writes), (), tuple(slices))
                tokens += runner.launch(plan).result().tokens
        return tokens

    def run(self) -> None:
        """Each prompt in one way, each forced token in one way: all of the ways that steps take."""
        cases = self._cases
        third = max(1, len(cases) // 3)
        alone, beside = cases[: third // 2], cases[third // 2 : third]
        for case in alone:
            self.step("prompt alone", [], [(case, 0, len(case.prompt))])
        decoded = [(case, 0) for case in alone]
        self.step("prompts beside rows", decoded, [(case, 0, len(case.prompt)) for case in beside])
        self._draw(decoded, beside)
        side_by_side = cases[third : 2 * third]
        self.step("prompts together", [], [(case, 0, len(case.prompt)) for case in side_by_side])
        for index, case in enumerate(cases[2 * third :]):
            length = len(case.prompt)
            cut = CHUNK_MULTIPLE if length > CHUNK_MULTIPLE else length // 2 + 1
            # Rows of the first prompts run along: steps that mix.
            mixed = [(cases[index], 0)] if index < third else []
            self.step("prompt in chunks", mixed, [(case, 0, cut)])
            self.step("prompt in chunks", [], [(case, cut, length)])
        late = [case for index, case in enumerate(cases) if not (index < third and index < len(cases) - 2 * third)]
        self.step("rows", [(case, 0) for case in late], [])
        for index in range(1, NUM_FORCED - 1):
            self.step(f"{len(cases)} rows", [(case, index) for case in cases], [])
        for case in cases:
            self.step("one row", [(case, NUM_FORCED - 1)], [])

    def _draw(self, decoded: list[tuple[Case, int]], prompts: list[Case]) -> None:
        """The last step again, its tokens chosen by the drawing kernel where there is one."""
        greedy = SamplingParams(temperature=0.0)
        inits = [SlotInit(case.slot, 0, greedy, case.forced[index]) for case, index in decoded]
        inits += [SlotInit(case.slot, 0, greedy, None) for case in prompts]
        rows = [Slice(f"case-{case.slot}", 0, case.slot, len(case.prompt) + index) for case, index in decoded]
        chunks = [
            Slice.of_prompt(f"case-{case.slot}", case.slot, 0, case.prompt, (SampleTarget(case.slot, 0),))
            for case in prompts
        ]
        logits = torch.cat(self._last)
        tokens = self._launch(inits, [], rows, chunks)
        self.num_drawn += len(logits)
        self.num_best += sum(
            float(row[token.token_id]) == float(row.max()) for row, token in zip(logits, tokens, strict=True)
        )


def compare(rows: Rows, exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Errors of this engine and of transformers in its type, in thousandths, by the way that a row was computed."""
    ways: dict[str, list[tuple[float, float, bool, bool]]] = {}
    for (slot, index), (way, row) in sorted(rows.items(), key=lambda item: item[0]):
        reference = exact[slot][index]
        norm = reference.norm()
        ours, theirs = (float((x - reference).norm() / norm) for x in (row, rounded[slot][index]))
        best = int(reference.argmax())
        same = (int(row.argmax()) == best, int(rounded[slot][index].argmax()) == best)
        ways.setdefault(way, []).append((ours, theirs, *same))
    ways["all"] = [entry for entries in ways.values() for entry in entries]
    return [
        {
            "way": way,
            "rows": len(entries),
            "ours mean": statistics.fmean(1000 * e[0] for e in entries),
            "HF mean": statistics.fmean(1000 * e[1] for e in entries),
            "ours max": max(1000 * e[0] for e in entries),
            "HF max": max(1000 * e[1] for e in entries),
            "ours top-1": statistics.fmean(e[2] for e in entries),
            "HF top-1": statistics.fmean(e[3] for e in entries),
        }
        for way, entries in ways.items()
    ]


def check(shape: Path, lengths: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(make_shape_folder(shape, Path(temporary)))
        config = AutoConfig.from_pretrained(folder)
        cases = make_cases(lengths, config.vocab_size)
        exact = reference_rows(folder, cases, torch.float32, device)
        rounded = reference_rows(folder, cases, torch.bfloat16, device)
        size = EngineSize(
            max_sequences=len(cases), max_model_len=4096, max_step_tokens=8192, device=options.device,
            capacity_tokens=sum(len(case.ids) + 2 * BLOCK_SIZE for case in cases) + 4096, block_size=BLOCK_SIZE,
        )  # fmt: skip
        lanes = LaneObjectives() if options.lanes == 2 else None
        runner = BareEngine(folder, "bfloat16", "dummy", size, lanes=lanes).runner
    shares = [*runner.shares, WHOLE_CARD] if options.lanes == 2 else [None]
    results = [_check_lane(shape.stem, runner, share, cases, exact, rounded, options.slack) for share in shares]
    return {
        "is_good": all(result["is_good"] for result in results),
        "ways": [way for r in results for way in r["ways"]],
    }


def _check_lane(
    name: str,
    runner: ModelRunner,
    share: LaneShare | None,
    cases: list[Case],
    exact: list[torch.Tensor],
    rounded: list[torch.Tensor],
    slack: float,
) -> dict[str, Any]:
    """share: of the card, for prompts; None: there is one lane."""
    seen = SeenLogits(runner, cases, None if share is None else runner.beside(share))
    with seen.watch():
        seen.run()
    missing = [(c.slot, i) for c in cases for i in range(NUM_FORCED + 1) if (c.slot, i) not in seen.rows]
    if missing:
        raise RuntimeError(f"no logits of {missing}")
    rows = compare(seen.rows, exact, rounded)
    where = "" if share is None else f", prompts on {share.num_processors or 'all'} multiprocessors"
    print(f"{name}{where}: |x - float32| / |float32| of a row of logits, thousandths\n{table(rows)}", flush=True)
    everything = rows[-1]
    print(f"{seen.num_best} of {seen.num_drawn} tokens drawn beside each other have the best logit", flush=True)
    is_good = everything["ours mean"] <= everything["HF mean"] * (1 + slack)
    is_good = is_good and seen.num_best == seen.num_drawn
    return {"is_good": is_good, "ways": rows}


def main() -> int:
    """0 when all shapes are within the error of transformers' own bf16, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path, nargs="+")
    parser.add_argument("--slack", type=float, default=0.1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lanes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results = {shape.stem: check(shape, tuple(options.lengths), options) for shape in options.shapes}
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    bad = [name for name, result in results.items() if not result["is_good"]]
    print(f"beyond transformers' own error: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
