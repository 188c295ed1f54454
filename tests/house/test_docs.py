"""Checks of README.md and docs/: their commands, code, files, settings, variables, metrics and paths exist and work."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

from lockstep.rollout.speculation.no_draft import NoDraft
from lockstep.tests.house.test_layout import PLACES, ROOT, modules
from lockstep.tests.optional_packages import needs_transformers

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CHECKED = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names things that are gone
NAMES = [page.relative_to(ROOT).as_posix() for page in CHECKED]
TEXTS = dict(zip(NAMES, (page.read_text(encoding="utf-8") for page in CHECKED), strict=True))

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
A_FILE = re.compile(r"(?:[\w.]+/)*[\w.]+\.(?:py|md|toml|cpp|h|svg|cfg|html|txt)|(?:[\w.-]+/)+(?:[\w.]+/)?")
# What a run makes, or what must not be there.
NOT_OURS = re.compile(r"runs/.*|checkpoints/|rollouts/|model/|conftest\.py")
METRIC = re.compile(r"\b(?:lockstep|sglang):[a-z0-9_]+")


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Return (info string, code) of the fenced blocks in these languages."""
    return [(info.strip(), code) for info, code in FENCE.findall(text) if info.split(" ")[0].strip() in languages]


def spans(text: str) -> list[str]:
    """Return the inline code of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text))


def all_spans() -> Iterator[tuple[str, str]]:
    """Yield (page, span) for the inline code of every page."""
    return ((name, span) for name, text in TEXTS.items() for span in spans(text))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Load docs/make_reference.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- pages and links ---------------------------------------------------------------------------------------------------


def test_every_setting_has_a_meaning():
    rows = re.findall(r"^\| `(\w[\w.]*)` \| .* \| (.*) \|$", TEXTS["docs/reference/settings.md"], re.MULTILINE)
    assert len(rows) > 200 and [name for name, meaning in rows if not meaning.strip()] == []


def test_readme_is_of_one_sitting():
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_no_placeholder_is_left():
    assert [name for name, text in TEXTS.items() if re.search(r"@[A-Z_]+@|\bTODO\b|\bFIXME\b", text)] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def test_every_page_of_docs_is_linked_from_another():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert [page for page in (ROOT / "docs").rglob("*.md") if page not in linked] == []


def test_every_file_that_a_page_names_is_there():
    missing = [
        f"{name}: {span}"
        for name, span in all_spans()
        if A_FILE.fullmatch(span) and not NOT_OURS.fullmatch(span) and not exists(name, span)
    ]
    assert missing == []


def test_readme_and_the_page_of_limits_name_the_same_tested_families():
    lists = [
        re.search(r"Tested families: (.+?), in float32", " ".join(TEXTS[page].split()))
        for page in ("README.md", "docs/limits.md")
    ]
    between = re.compile(
        r",(?: and with (?:recurrent layers|sparse attention))? | and (?:with sparse attention |, in chunks, )?"
    )
    readme, limits = (between.split(match[1]) for match in lists if match)
    assert len(readme) > 15
    assert readme == limits


EXTRA = re.compile(r"(?:extra `(\w+)`: )?(?:pip install [^\n\"]*?-e ['\"]?\.|lockstep)\[([\w,]+)\]")


def test_install_lines_of_pages_and_messages_have_one_form_and_name_extras_that_exist():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    sources = [*modules().values(), *(ROOT / "examples").glob("*.py")]
    texts = {**TEXTS, **{path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources}}
    found = [(name, match) for name, text in texts.items() for match in EXTRA.finditer(text)]
    wrong = [
        (name, match[0])
        for name, match in found
        if match[0].endswith(f"lockstep[{match[2]}]")  # it is on no index
        or "-e '.[" not in match[0]  # zsh reads brackets without quotes as a pattern
        or not set(match[2].split(",")) <= set(config["options.extras_require"])
        or (match[1] or match[2]) != match[2]
    ]
    assert wrong == []
    assert len({name for name, _ in found}) > 8


def exists(page: str, path: str) -> bool:
    """Return whether a path exists, relative to the root or to the page."""
    return (ROOT / path).exists() or (ROOT / page).parent.joinpath(path).exists()


def test_architecture_lists_every_place_and_arrows_of_its_tables_run_downward():
    text = TEXTS["docs/architecture.md"]
    folders = {place.replace(".", "/") for place in PLACES}
    folders = {f"{folder}/" for folder in folders if (ROOT / folder).is_dir() and folder.count("/") == 1}
    assert sorted(folder for folder in folders if f"`{folder}`" not in text) == []
    order = re.findall(r"^\| `rollout/(\w+)(?:/|\.py)` \|", text, re.MULTILINE)
    upward = [
        f"{place} imports {target}"
        for place in order
        for target in PLACES[f"rollout.{place}"].split()
        if target in order and order.index(target) < order.index(place)
    ]
    assert upward == []


# -- Python ------------------------------------------------------------------------------------------------------------

PYTHON = [(name, index) for name, text in TEXTS.items() for index in range(len(blocks(text, "python")))]


@pytest.mark.parametrize(("name", "index"), PYTHON)
def test_python_blocks_compile_and_their_imports_resolve(name, index):
    code = blocks(TEXTS[name], "python")[index][1]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            imported = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(imported, alias.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Make a folder in which the pages' code runs, with a very small model in place of README's trained one."""
    from lockstep.integration.grpo.tasks.arithmetic import CONTEXT_TOKENS, VOCAB_SIZE, build_tokenizer
    from lockstep.tests.support.random_models import random_model

    home = tmp_path_factory.mktemp("home")
    model = random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT_TOKENS)
    model.save_pretrained(home / "runs" / "arithmetic" / "model")
    build_tokenizer().save_pretrained(home / "runs" / "arithmetic" / "model")
    return home


def policy_loss(model: Any, samples: list[Any]) -> Any:
    """Return a loss of the form that README's loop expects from its reader."""
    import torch

    ids = torch.tensor([[*samples[0].prompt_ids, *samples[0].token_ids]])
    return model(input_ids=ids).logits.float().logsumexp(-1).mean()


@pytest.mark.parametrize("name", sorted({name for name, _ in PYTHON}))
def test_python_blocks_of_a_page_run_one_after_another(name, home, monkeypatch, capsys):
    import torch

    if name == "docs/guides/images.md":
        needs_transformers(5, 23)
    monkeypatch.chdir(home)
    namespace: dict[str, Any] = {"__name__": name}
    given = blocks(TEXTS["README.md"], "python")[0][1]
    codes = [code for info, code in blocks(TEXTS[name], "python") if info == "python"]
    try:
        exec(compile(given, "README.md", "exec"), namespace)
        namespace |= {"prompts": ["What is 1 + 2?\n"], "policy_loss": policy_loss}
        namespace["optimizer"] = torch.optim.SGD(namespace["model"].parameters(), lr=1e-3)
        for code in codes[1:] if name == "README.md" else codes:
            exec(compile(code, name, "exec"), namespace)
        if name == "docs/guides/numerics.md":
            assert namespace["gap"] == 0.0 and len(namespace["sample"].token_ids) == 16
        if name == "docs/guides/prefix-cache.md":
            assert namespace["report"].num_pinned == 2
    finally:
        if "service" in namespace:
            namespace["service"].close()


@pytest.mark.parametrize("name", ["README.md", "docs/guides/numerics.md"])
def test_pages_for_trainers_name_what_gives_the_engines_log_probabilities(name):
    named = "lockstep.kernels.sampling.logprobs.selected_logprobs(logits, token_ids, temperature)"
    assert named in spans(TEXTS[name])
    module, _, function = named.partition("(")[0].rpartition(".")
    assert list(inspect.signature(getattr(importlib.import_module(module), function)).parameters) == [
        "logits", "token_ids", "temperature",
    ]  # fmt: skip


def test_the_example_with_tools_says_which_models_know_calls():
    before = TEXTS["docs/guides/http.md"].partition("```python client")[0].partition("## Tools")[2]
    assert "--tool-call-parser" in before and "arithmetic model" in before


def test_methods_that_a_page_names_exist():
    from lockstep import Engine, RolloutService

    classes = {"engine": Engine, "service": RolloutService}
    missing = []
    for name, span in all_spans():
        match = re.match(r"(engine|service)\.([a-z_]+)(?=\(|$)", span)
        if match and not hasattr(classes[match[1]], match[2]) and span not in job_settings():
            missing.append(f"{name}: {span}")
    assert missing == []


# -- shell -------------------------------------------------------------------------------------------------------------


def commands_of(text: str) -> list[str]:
    """Return the commands in a page's shell blocks, and in its inline code without placeholders."""
    found = []
    for _, code in blocks(text, "bash", "sh", "shell", "console", ""):
        found += [line.strip() for line in code.replace("\\\n", " ").splitlines()]
    inline = [span for span in spans(text) if re.match(r"(lockstep|make|torchrun) ", span)]
    found += [span for span in inline if not re.search(r"\b(NAME|VERB|COMMAND|CONFIG|WORDS|TARGET)\b|…", span)]
    return [line for line in found if line and not line.startswith("#")]


COMMANDS = [(name, command) for name, text in TEXTS.items() for command in dict.fromkeys(commands_of(text))]


def test_pages_show_the_commands_that_matter():
    assert len(COMMANDS) > 30
    words = " ".join(command for _, command in COMMANDS)
    assert all(f"make {target}" in words for target in makefile_targets() - {"clean"})


def makefile_targets() -> set[str]:
    """Return the targets that the Makefile declares."""
    return set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_shell_commands_are_understood(name, command, reference):
    words = shlex.split(command, comments=True)
    while re.match(r"\w+=", words[0]):  # variables of this command alone
        words.pop(0)
    program, *arguments = words
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert set(targets) <= makefile_targets()
        if "train" in targets:
            for overrides in values_of("ARGS", arguments):
                check_job(name, ["configs/arithmetic_cpu.toml", *overrides.split()])
    elif program == "lockstep":
        check_lockstep(name, reference, arguments)
    elif program == "torchrun" and "-m" in arguments:
        module = arguments.index("-m")
        check_module(name, reference, arguments[module + 1], arguments[module + 2 :])
    elif program == "cd":
        assert all(exists(name, folder) for folder in arguments)
    elif program in ("torchrun", "python", "pip", "VENV/bin/pip"):
        assert all(exists(name, file) for file in arguments if file.endswith(".py"))
        extras = configparser.ConfigParser()
        extras.read(ROOT / "setup.cfg")
        named = {
            extra for word in arguments for extra in "".join(re.findall(r"^\.\[(.+)\]$", word)).split(",") if extra
        }
        assert named <= set(extras["options.extras_require"])
    else:
        assert program == ".ci/run", f"{program} is not known to this test"


def values_of(variable: str, arguments: list[str]) -> list[str]:
    return [word.partition("=")[2] for word in arguments if word.startswith(f"{variable}=")]


def check_module(page: str, reference: ModuleType, module: str, arguments: list[str]) -> None:
    """Check the command `-m MODULE ARGUMENTS`."""
    if module == "lockstep.integration.grpo":
        check_job(page, [word for word in arguments if word not in ("--check", "--resume")])
    else:
        assert module == "lockstep.integration.cli"
        check_lockstep(page, reference, arguments)


def check_job(page: str, arguments: list[str]) -> None:
    """Check that the job's own reader accepts CONFIG key=value ..."""
    from lockstep.integration.grpo.settings.config import load_config

    config, *overrides = arguments
    assert exists(page, config)
    load_config(ROOT / config if (ROOT / config).exists() else (ROOT / page).parent / config, overrides)


def check_lockstep(page: str, reference: ModuleType, arguments: list[str]) -> None:
    """Parse the arguments with the command's own parser, and check that named settings exist."""
    from lockstep import EngineConfig, SamplingParams

    num_words = 2 if arguments[0] == "bench" and len(arguments) > 1 else 1
    if arguments[0].startswith("--"):
        assert arguments[0] in ("--version", "--help")
        return
    if arguments == ["bench"]:
        return
    assert arguments[0] in reference.commands()
    if len(arguments) == 1:
        return  # the command by its name
    parser = reference.parser_of(*arguments[:num_words])
    options = parser.parse_intermixed_args(arguments[num_words:]) if arguments[0] == "train" else None
    options = options or parser.parse_args(arguments[num_words:])
    if arguments[0] == "train":
        check_job(page, [options.config, *options.overrides])
    for flag, cls in (("engine", EngineConfig), ("sampling", SamplingParams)):
        given = {item.partition("=")[0] for item in getattr(options, flag, None) or []}
        assert given <= {field.name for field in fields(cls)}


# -- settings ----------------------------------------------------------------------------------------------------------


def job_settings(cls: type | None = None, prefix: str = "") -> dict[str, object]:
    """Return every key of the job's config with its default."""
    from lockstep.integration.grpo.settings.config import JobConfig
    from lockstep.integration.grpo.settings.reading import section_of_each

    found: dict[str, object] = {}
    types = get_type_hints(cls or JobConfig)
    for field in fields(cls or JobConfig):  # type: ignore[arg-type]
        if is_dataclass(types[field.name]):
            found |= job_settings(types[field.name], f"{prefix}{field.name}.")
        elif section := section_of_each(types[field.name]):
            found |= job_settings(section, f"{prefix}{field.name}.NAME.")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[f"{prefix}{field.name}"] = default if default != {} else ""
    return found


def test_every_setting_of_the_job_is_listed_with_its_default_and_no_other_is():
    text = TEXTS["docs/reference/settings.md"]
    chapter = text[: text.index("## EngineConfig")]
    rows = dict(re.findall(r"^\| `([a-zA-Z0-9_.]+)` \| `?([^|`]*?)`? \|", chapter, re.MULTILINE))
    expected = {
        key: "required" if value is MISSING else "" if value is None else str(value)
        for key, value in job_settings().items()
    }
    expected = {
        key: value.lower() if value in ("True", "False") else value or "empty" for key, value in expected.items()
    }
    assert rows == expected


def test_settings_that_a_page_names_exist():
    from lockstep import Engine, EngineConfig, RolloutService, SamplingParams
    from lockstep.integration.explain.ways import Way
    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.router.config import RouterConfig
    from lockstep.integration.service_config import ServiceConfig

    keys = job_settings()
    known = {field.name for cls in (EngineConfig, SamplingParams, ServiceConfig, HttpConfig, RouterConfig, Way)
             for field in fields(cls)}  # fmt: skip
    for cls in (Engine, RolloutService):
        for _, method in inspect.getmembers(cls, inspect.isfunction):
            known |= set(inspect.signature(method).parameters)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    missing = []
    for name, span in all_spans():
        key, equals, _ = span.partition("=")
        section = key.partition(".")[0]
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", key) and section in sections:
            if key not in keys and not (section == "engine" and hasattr(Engine, key.partition(".")[2])):
                missing.append(f"{name}: {span}")
        elif equals and re.fullmatch(r"[a-z_]+", key) and key not in known | set(keys) | {"key"}:
            missing.append(f"{name}: {span}")
    assert missing == []


# -- environment, metrics, HTTP, pickles -------------------------------------------------------------------------------


def variables_of_the_code() -> set[str]:
    """Return the environment variables that the package reads."""
    found: set[str] = set()
    for path in modules().values():
        text = path.read_text()
        found |= set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(\w+)\"", text))
        found |= set(re.findall(r"\"((?:LOCKSTEP|SGLANG|TORCHELASTIC)_[A-Z_]*[A-Z])\"", text))
        for names in re.findall(r"for name in \(([^)]*)\)", text):
            found |= set(re.findall(r"\"([A-Z]{2,}[A-Z_]*)\"", names)) if "environ" in text else set()
    return found


def test_every_environment_variable_is_listed_and_no_other_is():
    listed = set(re.findall(r"`([A-Z]{2,}[A-Z_]*)`", TEXTS["docs/reference/environment.md"]))
    read = variables_of_the_code()
    assert {"LOCKSTEP_NATIVE", "SGLANG_OMNI_ADMIN_KEY", "MASTER_ADDR", "CXX"} <= read
    assert sorted(read - listed) == []
    in_no_pattern = {"MASTER_PORT"} | {"LD_PRELOAD"}  # read beside others, or looked for by `in`
    assert sorted(listed - read - in_no_pattern) == []
    pattern = re.compile(r"\b(?:LOCKSTEP|SGLANG)_[A-Z_]*[A-Z]\b")
    named = {(name, word) for name, text in TEXTS.items() for word in pattern.findall(text)}
    assert sorted((name, word) for name, word in named if word not in read) == []


def test_every_reason_for_no_draft_is_explained():
    explained = re.findall(r"^\| (`.+?`) \|", TEXTS["docs/guides/speculation.md"], re.MULTILINE)
    names = {name for row in explained for name in re.findall(r"`(\w+)`", row)}
    assert {str(why) for why in NoDraft} <= names


def test_metrics_that_a_page_names_exist(reference):
    known = {name for families in reference.metric_families().values() for name, *_ in families}
    assert {"lockstep:steps_total", "sglang:token_usage", "lockstep:router_workers"} <= known
    named = {(page, word) for page, text in TEXTS.items() for word in METRIC.findall(text)}
    assert sorted((page, word) for page, word in named if word not in known) == []


def test_http_paths_that_a_page_names_exist(reference):
    from lockstep.integration.router.changes.rules import RULES

    known = {path for rows in reference.http_paths().values() for path, *_ in rows}
    known |= {f"/{verb}" for verb in RULES} | {"/openapi.json"}
    pattern = re.compile(r"(?:(?:GET|POST|PUT|DELETE) )?(/[a-z_/{}0-9-]*)(?: \{.*\})?")
    named = {(name, match[1]) for name, span in all_spans() if (match := pattern.fullmatch(span))}
    assert len(named) > 40
    assert sorted((name, path) for name, path in named if path not in known and path != "/dev/shm") == []


def test_the_table_of_pickles_has_every_name_that_a_payload_may_contain():
    from lockstep.weight_sync.pickles.payload_tensors import ALLOWED

    text = TEXTS["SECURITY.md"]
    one_by_one = {(module, name) for module, name in ALLOWED if module != "torch"}
    assert sorted(name for _, name in one_by_one if f"`{name}`" not in text) == []
    assert {name for module, name in ALLOWED if module == "torch" and not name.endswith("Storage")} >= {
        "Size",
        "Tensor",
    }


@pytest.mark.parametrize("page", ["settings.md", "cli.md", "metrics.md", "http-paths.md"])
def test_reference_pages_are_what_the_code_says(page, reference):
    assert page in reference.PAGES
    assert reference.PAGES[page]() == (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")


def test_every_chapter_of_figures_is_from_one_machine_of_the_table():
    head, *chapters = re.split(r"^## ", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = set(re.findall(r"^\| ([A-Z]) \|", head, re.MULTILINE))
    assert known >= {"A", "B", "C", "D"}
    named = {chapter.partition("\n")[0]: set(re.findall(r"\b[Mm]achine ([A-Z])\b", chapter)) for chapter in chapters}
    wrong = {name: letters for name, letters in named.items() if len(letters) != 1 or not letters <= known}
    assert wrong == {}
