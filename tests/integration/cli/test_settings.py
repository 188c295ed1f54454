"""Settings of commands from flags and config files: wrong types are refused in one line, by their names."""

import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.cli.arguments.settings import build
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.service_config import ServiceConfig


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("allow_mixed_versions=False", "route: allow_mixed_versions must be true or false, not 'False'"),
        ("health_interval_s=abc", "route: health_interval_s must be a number, not 'abc'"),
        ("health_interval_s=NaN", "route: health_interval_s must be positive, not nan"),
        ("hedge_after_s=abc", "route: hedge_after_s must be a number, not 'abc'"),
        ("affinity_slack=abc", "route: affinity_slack must be a whole number, not 'abc'"),
        ("dead_after=1.5", "route: dead_after must be a whole number, not 1.5"),
        ("moved_streams=3", "route: moved_streams must be one of proven, trusted, off, not 3"),
    ],
)
def test_a_router_refuses_settings_of_another_type(setting, words, capsys):
    assert cli.main(["route", "--setting", setting]) == 2
    assert capsys.readouterr().err == f"lockstep: error: {words}\n"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('service.allow_pickle = "no"', "service: allow_pickle must be true or false, not 'no'"),
        ('service.weight_timeout_s = "x"', "service: weight_timeout_s must be a number, not 'x'"),
        ("service.shared_memory_folder = 5", "service: shared_memory_folder must be a path, not 5"),
        ('http.max_prompts = "5"', "http: max_prompts must be a whole number, not '5'"),
        ('http.session_idle_s = "x"', "http: session_idle_s must be a number, not 'x'"),
        ("http.api_key = 98765", "http: api_key must be text"),
        ("http.extra_server_args = 3", "http: extra_server_args must be a table"),
        ("http.host = 5", "http: host must be text, not 5"),
        ('http.port = "x"\nhttp.stage = 1', "http: port must be a whole number, not 'x'; stage must be text, not 1"),
        ("engine = 3", "--config c.toml: engine must be a table, not 3"),
        ("motor = 3", "--config c.toml: unknown table motor; known: engine, http, service"),
    ],
)
def test_a_server_refuses_a_config_file_with_values_of_another_type(table, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(table)
    assert cli.main(["serve", "--model", "m", "--config", "c.toml"]) == 2
    assert capsys.readouterr().err == f"lockstep: error: {words}\n"


def test_settings_of_the_right_types_are_taken(tmp_path):
    service = build(
        ServiceConfig, {"weight_timeout_s": 5, "shared_memory_folder": str(tmp_path), "allow_pickle": False}
    )
    assert (service.weight_timeout_s, service.shared_memory_folder, service.allow_pickle) == (5.0, tmp_path, False)
    http = build(HttpConfig, {"api_key": None, "extra_server_args": {"a": [1]}, "model_name": "m"})
    assert (http.extra_server_args, http.model_name) == ({"a": [1]}, "m")
    settings = {"http": http, "workers": ("http://h:1",), "journal": None, "hedge_after_s": None}
    assert build(RouterConfig, settings).workers == ("http://h:1",)
