"""ApiError: the one shape of errors, across processes too."""

from __future__ import annotations

import copy
import pickle

import pytest

from cluster.api_error import ApiError


def test_envelope_has_the_four_keys_of_openai() -> None:
    error = ApiError(400, "n must be at most 8", param="n", code="invalid_value")
    assert error.envelope() == {
        "error": {
            "message": "n must be at most 8",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_survives_pickling(clone: object) -> None:
    error = ApiError(429, "busy", "rate_limit_error", "p", "shed", 1.5)
    again = clone(error)  # type: ignore[operator]
    assert type(again) is ApiError
    assert vars(again) == vars(error)
    assert str(again) == "busy"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_type_follows_from_status(status: int, expected: str) -> None:
    assert ApiError(status, "x").type == expected
    assert ApiError(status, "x", type="other").type == "other"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_and_never_zero(seconds: float, header: str) -> None:
    assert ApiError(429, "busy", retry_after_s=seconds).headers() == {"Retry-After": header}


def test_no_header_without_a_time() -> None:
    assert ApiError(429, "busy").headers() == {}
