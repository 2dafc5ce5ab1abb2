"""`splitserve serve MODEL` without a config file: what was chosen is shown, and a model that is only named answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_folder import model_folder
from tests.server.running_server import run_serve


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_answers_whatever_other_ray_the_environment_names(tmp_path: Path) -> None:
    model = tmp_path / "chat"
    model.symlink_to(model_folder())
    arguments = [str(model), "--prefill", "0", "--set", "model.max_model_len=512", "--set", "model.name=mine"]
    arguments += ["--set", f"logging.file={tmp_path / 'replicas.log'}"]
    with run_serve(arguments, tmp_path, {"RAY_ADDRESS": "127.0.0.1:1"}) as server:
        body = {"model": "mine", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        with server.client() as client:
            answer = client.post("/v1/completions", json=body)
            models = client.get("/v1/models").json()
        log = server.log_file.read_text()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith(" Paris")
    assert [model["id"] for model in models["data"]] == ["mine"]
    chosen, _, rest = log.partition("starting replicas")
    assert rest
    for part in (str(model), "512 tokens a request of 8,192", "colocated (1 decode): as you said", "RAY_ADDRESS"):
        assert part in chosen
