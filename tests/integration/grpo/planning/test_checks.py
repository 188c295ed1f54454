"""Faults that the check of a job finds before its model is loaded, each by the key of its setting."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.settings.unread import unread_settings
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.warm_start import ModelSpec, build_model

CONFIG = Path(__file__).parents[4] / "configs" / "arithmetic_cpu.toml"


def config(tmp_path: Path, *overrides: str) -> JobConfig:
    return load_config(CONFIG, [f"run.dir={tmp_path}", *overrides])


def test_a_port_in_use_is_named_by_the_ranks_whose_engines_answer_there(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^http\.port: cannot listen on 127\.0\.0\.1:{port}: "):
            check_job(config(tmp_path, f"http.port={port}"), 2)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(ValueError, match=rf"^http\.port: cannot listen on 127\.0\.0\.1:{port}: "):
            check_job(config(tmp_path, f"http.port={port - 1}"), 2)
        check_job(config(tmp_path, f"http.port={port - 1}", "parallel.tp=2", "engine.k_blocks=2"), 2)
    with pytest.raises(ValueError, match=r"^http\.port: port must be from 0 to 65535, not 65536"):
        check_job(config(tmp_path, "http.port=65535"), 2)


def test_the_shape_of_a_built_model_and_the_range_of_sums_are_refused_by_their_keys(tmp_path):
    with pytest.raises(ValueError, match=r"^model\.hidden_size=16 is not a .*; model\.head_dim=16 is not a positive"):
        check_job(config(tmp_path, "model.head_dim=16", "model.hidden_size=16"), 2)
    with pytest.raises(ValueError, match=r"^data\.min_digits and max_digits must be .* not 3 and 30$"):
        check_job(config(tmp_path, "data.max_digits=30"), 2)
    with pytest.raises(ValueError, match=r"^data\.num_heldout=9999999 is over half"):
        check_job(config(tmp_path, "data.num_heldout=9999999"), 2)


def test_a_shape_that_is_not_read_is_not_refused(tmp_path):
    model, spec = tmp_path / "model", ModelSpec(num_layers=1)
    build_model(spec, build_tokenizer()).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    check_job(config(tmp_path, f"model.path={model}", "model.head_dim=16"), 2)


def test_sums_that_are_too_long_are_refused_without_advice_on_rows(tmp_path):
    with pytest.raises(ValueError, match=r"takes prompts of \d+$"):
        check_job(config(tmp_path, "rollout.max_new_tokens=60"), 2)
    unread = unread_settings(config(tmp_path, "data.too_long=drop"))
    assert unread == ['data.too_long="drop" (problems are generated sums)']


def test_a_port_needs_the_packages_of_a_server(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ValueError, match=r"must be installed for http\.port, the extra `serve`"):
        check_job(config(tmp_path, "http.port=40000"), 2)
