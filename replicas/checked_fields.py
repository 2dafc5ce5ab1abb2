"""Fields of messages with their ranges: the numbers and names, and what scheduler/ cannot state of its own types."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from scheduler.generated_token import Token
from scheduler.moved_choice import MovedChoice

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Amount = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]  # which is neither infinite nor NaN
Score = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Name = Annotated[str, Meta(max_length=4096)]


if TYPE_CHECKING:
    CheckedToken = Token
    CheckedMove = MovedChoice
else:

    class CheckedToken(Token):
        """A Token as it is decoded: the ranges of its fields, which scheduler/ cannot state. Equal to the Token."""

        __slots__ = ()
        request_id: Name
        choice: Count
        index: Count
        token_id: Count

    class CheckedMove(MovedChoice):
        """Likewise, a MovedChoice."""

        __slots__ = ()
        choice: Count
        token_ids: tuple[Count, ...]
        places: tuple[Count, ...]
