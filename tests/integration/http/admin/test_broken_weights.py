"""Tests of a server that was given weights of NaN: requests hear of it, and a later update with good ones serves."""

from __future__ import annotations

import pytest
import torch

BODY = {"input_ids": [3, 14, 15, 92], "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
WHY = "the model's logits are NaN or infinite"


@pytest.fixture
def diverged(model, tmp_path):
    """Write a checkpoint of NaN, as of a policy that has diverged."""
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "diverged", state_dict=state)
    return tmp_path / "diverged"


def update(client, folder):
    answer = client.post("/update_weights_from_disk", json={"model_path": str(folder)})
    assert answer.status_code == 200, answer.text


def test_requests_end_with_the_reason_and_good_weights_serve_again(client, diverged, tmp_path):
    expected = client.post("/generate", json=BODY).json()["output_ids"]
    update(client, diverged)
    for _ in range(2):
        answer = client.post("/generate", json=BODY).json()
        reason = answer["meta_info"]["finish_reason"]
        assert (answer["output_ids"], reason["type"]) == ([], "abort") and WHY in reason["message"]
        assert client.get("/health").status_code == client.get("/health_generate").status_code == 200
    choice = client.post("/v1/completions", json={"model": "", "prompt": [3, 14], "max_tokens": 4}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    update(client, tmp_path / "model")
    assert client.post("/generate", json=BODY).json()["output_ids"] == expected
