"""Whose request it is, from its headers."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from cluster.config.fairness import FairnessConfig
from cluster.http.client_label import client_label

KEY = {"Authorization": "Bearer sk-1", "X-Client-Id": "team", "X-Tenant": "tenant"}
NONE, BY_KEY, BY_HEADER = FairnessConfig(), FairnessConfig(by="api_key"), FairnessConfig(by="header")
BY_TENANT = FairnessConfig(by="header", header="X-Tenant")


def label(headers: dict[str, str], fairness: FairnessConfig) -> str:
    return client_label(Headers(headers), fairness)


def test_one_client_without_configuration() -> None:
    assert label(KEY, NONE) == ""


@pytest.mark.parametrize("fairness", [BY_KEY, BY_HEADER])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Basic sk-1"}, {"Authorization": "Bearer "}])
def test_who_names_none_is_one_client(headers: dict[str, str], fairness: FairnessConfig) -> None:
    assert label(headers, fairness) == ""


def test_each_its_own_whatever_the_case_of_names_and_spaces_around() -> None:
    labels = [label(KEY, fairness) for fairness in (BY_KEY, BY_HEADER, BY_TENANT)]
    assert len(set(labels)) == 3
    assert labels[0] == label({"authorization": "bearer  sk-1 "}, BY_KEY)
    assert labels[0] != label({"authorization": "Bearer sk-2"}, BY_KEY)
    assert labels[1] == label({"x-client-id": "team"}, BY_HEADER)
    assert labels[1] != label({"x-client-id": "Team"}, BY_HEADER)


def test_the_label_is_the_same_in_every_process_and_gives_nothing_away() -> None:
    assert label({"Authorization": "Bearer sk-1"}, BY_KEY) == label(KEY, BY_KEY)
    assert len(label(KEY, BY_KEY)) == 16
    assert "sk-1" not in label(KEY, BY_KEY)
