"""The instructions that make words of 4 bits numbers, carried out as PTX defines them: numbers are the definition's.

Triton's interpreter has no instructions of a card's, so kernels there take another way than on a card.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels import int4_numbers

pytestmark = pytest.mark.interpreted

_TYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
# Each quarter has every number once.
_WORDS = torch.tensor([v | (15 - v) << 4 | 5 * v % 16 << 8 | (7 * v + 3) % 16 << 12 for v in range(16)])


def carried_out(
    text: str, words: torch.Tensor, given: dict[str, torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Of words [n], each in both halves of a register: the four pairs of numbers, of which both halves are alike.
    given: $5 to $12, of the type, broadcast to [.., n]."""
    registers = {"$4": words | words << 16, **given}

    def value(name: str) -> torch.Tensor:
        return torch.tensor(int(name, 16)) if name.startswith("0x") else registers[name]

    def number(name: str) -> torch.Tensor:
        found = value(name)
        if found.is_floating_point():
            return found.double()
        assert torch.equal(found & 0xFFFF, found >> 16), "what both halves have is the same"
        halves = torch.where(found & 0x8000 != 0, (found & 0xFFFF) - 0x10000, found & 0xFFFF).to(torch.int16)
        return halves.view(dtype).double()

    for line in text.splitlines():
        if line.startswith(("{", "}")):
            continue
        operation, rest = line.rstrip(";").split(" ", 1)
        to, *names = [part.strip() for part in rest.split(",")]
        if operation == "mov.b32":
            registers[to] = value(names[0])
        elif operation == "shr.b32":
            registers[to] = value(names[0]) >> int(names[1])
        elif operation == "lop3.b32":
            assert names[3] == "0xEA"
            registers[to] = value(names[0]) & value(names[1]) | value(names[2])
        else:
            rounding, kind = operation.split(".")[1:]
            assert (operation[:4], rounding, _TYPES[kind]) == ("fma.", "rn", dtype)
            exact = number(names[0]) * number(names[1]) + number(names[2])  # digits of a double hold all of it
            assert torch.equal(exact.float().double(), exact), "not rounded twice"
            registers[to] = exact.to(dtype)
    return [registers[f"${number}"] for number in range(4)]


def scales_of(dtype: torch.dtype) -> torch.Tensor:
    """All digits, powers from small to nearly the largest: [n, 1]."""
    digits = 1 + torch.arange(128) / 128
    powers = torch.arange(-20, 12) if dtype is torch.float16 else torch.arange(-90, 121, 7)
    scales = (digits[:, None] * torch.exp2(powers.float())).flatten().to(dtype)
    return torch.cat((scales, -scales, torch.zeros(1, dtype=dtype)))[:, None]


@pytest.mark.parametrize("zero", [0, 1, 7, 8, 15, 16, 77, 127])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_those_of_the_definition(dtype: torch.dtype, zero: int) -> None:
    scales = scales_of(dtype)
    if dtype is torch.bfloat16:
        text, added, multiplied = int4_numbers._AS_BFLOAT16, [-zero * 2.0**-6] * 4, scales * 64
    else:
        text, added, multiplied = int4_numbers._AS_FLOAT16, [-1024.0 - zero, -64.0 - zero] * 2, scales
    given = {f"${9 + number}": multiplied for number in range(4)}
    given |= {f"${5 + number}": torch.tensor(added[number]).to(dtype) for number in range(4)}
    assert [float(given[f"${5 + number}"]) for number in range(4)] == added, "numbers of the type"
    found = carried_out(text.value, _WORDS, given, dtype)
    for number, shift in zip(found, (0, 4, 8, 12), strict=True):
        wanted = ((_WORDS >> shift & 15).float() - zero) * scales.float()
        assert torch.equal(number, wanted.to(dtype))


@pytest.mark.parametrize("text", [int4_numbers._AS_BFLOAT16.value, int4_numbers._AS_FLOAT16.value])
def test_eight_numbers_take_thirteen_operations(text: str) -> None:
    operations = [line.split(".")[0] for line in text.splitlines() if not line.startswith(("{", "}", "mov"))]
    assert Counter(operations) == {"shr": 1, "lop3": 4, "fma": 8}
