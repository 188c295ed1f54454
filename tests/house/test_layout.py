"""The layout of the tree: its packages, the imports that are allowed, and the content of the wheel."""

import ast
import configparser
import importlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.tests.house.statements import statements

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGES = {"tests", "configs", "docs", "examples", "build", "dist", "runs"}  # data, and output of tools
ROOMS = {  # room: the rooms that it may import
    "kernels": {"kernels"},
    "rollout": {"rollout", "kernels"},
    "weight_sync": {"weight_sync", "kernels"},
    "integration": {"integration", "rollout", "weight_sync", "kernels"},
}
# Inside a room: a place (a sub-room, or a module that stands in the folder of a room with sub-rooms) and the places of
# the same room that it may import. docs/images/rooms.svg shows the same arrows.
PLACES = {
    "rollout.ahead": "completion control engine errors grammars request_options sampling_params",
    "rollout.proving": ("control grammars kv loop model receipt request_options running sampling_params sequences"),
    "rollout.engine": "completion config control loop one_process ranks replica reports request_options",
    "rollout.control": (
        "check completion errors giving_way grammars held_signals kept_kv kv loop media model replica request_options "
        "sampling_params sequences speculation"
    ),
    "rollout.loop": (
        "check completion config errors grammars kept_kv kv media model nothing ranks receipt replica reports "
        "running scheduling sequences speculation states"
    ),
    "rollout.replica": (
        "completion errors grammars kept_kv kv media model ranks reports request_options running sampling_params "
        "sequences states"
    ),
    "rollout.running": "completion errors kv media model reports sampling_params sequences states",
    "rollout.scheduling": "config kv sequences",
    "rollout.speculation": "config sequences",
    "rollout.kv": "config errors media model sequences states",
    "rollout.states": "errors model sequences",
    "rollout.model": "errors held_signals media ranks sharding",
    "rollout.media": "",
    "rollout.check": "media model ranks",
    "rollout.reports": "completion nothing sequences",
    "rollout.sequences": "completion errors grammars kept_kv media request_options sampling_params",
    "rollout.sharding": "ranks",
    "rollout.grammars": "errors giving_way sampling_params",
    "rollout.ranks": "errors",
    "rollout.completion": "kept_kv media request_options sampling_params",
    "rollout.receipt": "model sampling_params",
    "rollout.request_options": "kept_kv sampling_params",
    "rollout.kept_kv": "",
    "rollout.config": "",
    "rollout.errors": "",
    "rollout.sampling_params": "stop_patterns",
    "rollout.giving_way": "",
    "rollout.held_signals": "",
    "rollout.nothing": "",
    "rollout.one_process": "",
    "rollout.stop_patterns": "",
    "weight_sync.transports": "delta disk errors group layout manifest same_host target",
    "weight_sync.delta": "deadline digests disk errors layout manifest workers",
    "weight_sync.disk": "deadline digests errors layout locked_files manifest",
    "weight_sync.pickles": "errors layout manifest same_host",
    "weight_sync.digests": "layout manifest",
    "weight_sync.group": "deadline errors layout manifest pickles",
    "weight_sync.same_host": "errors layout locked_files manifest workers",
    "weight_sync.transaction": "deadline errors layout manifest",
    "weight_sync.layout": "manifest",
    "weight_sync.target": "errors",
    "weight_sync.deadline": "",
    "weight_sync.errors": "",
    "weight_sync.locked_files": "",
    "weight_sync.manifest": "",
    "weight_sync.workers": "",
    "integration.grpo.__main__": "grpo.main launcher",
    "integration.grpo.main": ("failures grpo.job grpo.planning grpo.results grpo.settings lost_ranks one_line ranks"),
    "integration.bench.job": "bench.parts bench.rivals grpo.job grpo.settings ranks",
    "integration.bench.rivals": "bench.parts",
    "integration.bench.ahead": "bench.parts grpo.backends grpo.engines grpo.rewards grpo.settings grpo.training ranks",
    "integration.bench.serve": "bench.parts http.edge http.server service",
    "integration.cli": (
        "explain failures grpo.planning grpo.probe grpo.results grpo.settings http.edge http.server launcher "
        "lost_ranks one_line pages ranks replay router.config router.server service service_config tinker.serving "
        "tinker.training "
        "version warming"
    ),
    "integration.warming": "",
    "integration.explain": "grpo.first_gap grpo.results grpo.training launcher ranks",
    "integration.grpo.first_gap": "failures grpo.results grpo.settings grpo.training ranks",
    "integration.grpo.probe": "grpo.engines grpo.job grpo.results grpo.settings grpo.training ranks",
    "integration.grpo.job": (
        "failures grpo.backends grpo.engines grpo.environments grpo.evaluation grpo.first_gap grpo.planning "
        "grpo.results grpo.rewards grpo.saving grpo.settings grpo.tasks grpo.training http.edge http.server "
        "image_inputs ranks"
    ),
    "integration.grpo.saving": "grpo.backends grpo.engines grpo.results grpo.settings ranks",
    "integration.grpo.evaluation": "grpo.engines grpo.results grpo.settings grpo.tasks ranks",
    "integration.http.server": "http.app http.edge http.generation http.observe service",
    "integration.router.server": "http.edge router.app router.changes router.config router.fleet",
    "integration.bench.gpu": "bench.decode bench.parts bench.pause service bench.on_gpu",
    "integration.http.app": (
        "http.admin http.chat http.conversations http.edge http.generation http.messages http.observe http.openai "
        "http.responses http.vllm service version"
    ),
    "integration.router.app": (
        "http.admin http.edge router.attending router.calls router.changes router.config router.fleet "
        "router.generation router.metrics router.router router.worker_paths"
    ),
    "integration.bench.cache": "bench.parts",
    "integration.bench.decode": "bench.parts",
    "integration.bench.grammar": "bench.parts",
    "integration.bench.overlap": "bench.parts",
    "integration.bench.pause": "bench.parts",
    "integration.bench.pin": "bench.parts",
    "integration.bench.replay": "bench.parts service",
    "integration.bench.rollout": "bench.parts bench.rivals",
    "integration.bench.schedule": "bench.parts",
    "integration.bench.on_gpu": "bench.parts",
    "integration.bench.several_ranks": "bench.parts",
    "integration.bench.soak": "bench.parts",
    "integration.bench.speculation": "bench.parts",
    "integration.bench.startup": "bench.parts",
    "integration.bench.sync": "bench.parts push.adapters service",
    "integration.http.responses": "http.chat http.conversations http.edge http.generation http.openai",
    "integration.http.openai": (
        "chat_tail http.chat http.conversations http.edge http.generation http.images http.observe"
    ),
    "integration.http.messages": (
        "http.admin http.chat http.conversations http.edge http.generation http.observe http.openai"
    ),
    "integration.http.vllm": (
        "http.admin http.edge http.generation http.images http.observe http.openai image_inputs service service_config"
    ),
    "integration.router.worker_paths": "http.edge router.fleet router.router",
    "integration.router.attending": "http.edge router.calls router.fleet router.router router.wire",
    "integration.bench.parts": "push.local_target push.remote_engine service",
    "integration.grpo.engines": (
        "activity failures grpo.backends grpo.environments grpo.results grpo.rewards grpo.settings grpo.tasks "
        "grpo.training push.adapters push.failures push.local_target push.pusher push.remote_engine ranks service"
    ),
    "integration.http.observe": "http.admin http.chat http.conversations http.edge http.images pages service version",
    "integration.router.generation": (
        "http.edge router.budget router.course router.fleet router.moving router.router router.sessions"
    ),
    "integration.router.router": (
        "http.edge router.budget router.calls router.changes router.config router.counters router.fleet "
        "router.metrics router.proxy router.wire"
    ),
    "integration.http.admin": "http.edge plain_values push.local_target service weights",
    "integration.push.remote_engine": "push.local_target push.starter service",
    "integration.router.metrics": "http.edge router.changes router.counters router.fleet",
    "integration.router.proxy": (
        "http.edge router.choosing router.config router.counters router.course router.fleet router.moving "
        "router.passing router.relay router.sessions router.wire"
    ),
    "integration.router.choosing": "http.edge router.config router.counters router.course router.fleet router.moving",
    "integration.router.course": "router.calls router.fleet router.moving router.relay router.sessions",
    "integration.router.passing": "router.budget router.moving router.relay",
    "integration.push.http_target": "one_line push.vllm_wire",
    "integration.router.moving": (
        "http.edge one_line push.http_target router.calls router.fleet router.relay router.wire"
    ),
    "integration.router.sessions": "http.edge router.calls router.fleet router.moving",
    "integration.grpo.planning": (
        "grpo.backends grpo.engines grpo.environments grpo.results grpo.rewards grpo.settings grpo.tasks "
        "grpo.training http.edge ranks"
    ),
    "integration.push.local_target": "plain_values service",
    "integration.router.changes": "http.edge router.calls router.config router.counters router.fleet router.wire",
    "integration.router.relay": "router.calls router.counters router.fleet router.wire",
    "integration.router.fleet": "http.edge router.calls router.config router.wire",
    "integration.service": "replay service_config weights",
    "integration.grpo.training": "grpo.backends grpo.settings image_inputs ranks",
    "integration.grpo.results": (
        "failures grpo.backends grpo.environments grpo.rewards grpo.settings grpo.tasks pages ranks replay"
    ),
    "integration.pages": "",
    "integration.grpo.tasks": "failures folder_processor grpo.settings",
    "integration.grpo.backends": "grpo.settings push.adapters ranks",
    "integration.http.chat": "http.edge http.generation http.images",
    "integration.http.generation": "http.conversations http.edge http.images",
    "integration.http.conversations": "chat_tail http.edge http.images",
    "integration.http.images": "folder_processor http.edge",
    "integration.push.vllm_wire": "",
    "integration.push.pusher": "push.adapters push.attendance push.failures",
    "integration.push.attendance": "push.failures",
    "integration.push.failures": "",
    "integration.router.config": "http.edge",
    "integration.replay": "",
    "integration.tinker.serving": "http.edge service tinker.training tinker.wire version",
    "integration.tinker.wire": "http.edge tinker.training",
    "integration.tinker.training": "failures grpo.backends grpo.training service",
    "integration.trl": "image_inputs service",
    "integration.verl": "push.http_target push.pusher",
    "integration.weights": "plain_values service_config",
    "integration.failures": "one_line",
    "integration.grpo.rewards": "grpo.settings grpo.tasks grpo.user_code",
    "integration.grpo.environments": (
        "chat_tail grpo.rewards grpo.settings grpo.tasks grpo.user_code http.conversations http.edge http.server "
        "image_inputs service"
    ),
    "integration.grpo.settings": "",
    "integration.grpo.user_code": "",
    "integration.chat_tail": "",
    "integration.http.edge": "",
    "integration.image_inputs": "",
    "integration.folder_processor": "",
    "integration.kv_events": "",
    "integration.launcher": "",
    "integration.lost_ranks": "one_line",
    "integration.one_line": "",
    "integration.plain_values": "",
    "integration.push.adapters": "",
    "integration.push.starter": "",
    "integration.ranks": "activity collective_watch",
    "integration.activity": "",
    "integration.collective_watch": "activity lost_ranks",
    "integration.router.wire": "http.edge router.calls",
    "integration.router.budget": "",
    "integration.router.calls": "http.edge",
    "integration.router.counters": "",
    "integration.service_config": "",
    "integration.version": "",
    "kernels.self_test": "attention linear machine",
    "kernels.attention": "machine",
    "kernels.drafts": "machine",
    "kernels.collectives": "machine",
    "kernels.layers": "machine",
    "kernels.recurrent": "layers machine",
    "kernels.linear": "layers machine",
    "kernels.sampling": "machine",
    "kernels.sha256": "machine",
    "kernels.machine": "",
}


@cache
def package_folders() -> list[Path]:
    """Return the folders below the root that hold the project's Python files, found once for all tests."""
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_PACKAGES]
    rooms = [room for room in rooms if not room.name.startswith((".", "__"))]
    folders = [folder for room in rooms for folder in (room, *room.rglob("*/"))]
    hidden = [folder for folder in folders if any(p.startswith((".", "__")) for p in folder.relative_to(ROOT).parts)]
    return sorted(folder for folder in {*folders} - {*hidden} if any(folder.glob("*.py")))


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name without the leading `lockstep.`."""
    files = [path for folder in package_folders() for path in sorted(folder.glob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def imported_modules(name: str, tree: ast.AST, known: set[str]) -> set[str]:
    """Return the known modules that `tree`, of module `name`, imports anywhere, TYPE_CHECKING included."""
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
            candidates = [t.removeprefix("lockstep.") for t in targets if t.startswith("lockstep.")]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = name.split(".")[: -node.level]
                assert len(name.split(".")) >= node.level, f"{name} imports from above the package"
                module = ".".join([*base, module]).strip(".")
            elif module == "lockstep" or module.startswith("lockstep."):
                module = module.removeprefix("lockstep").strip(".")
            else:
                continue
            # `from .a import b` may name the module a.b or something in a.
            candidates = [".".join(filter(None, (module, alias.name))) for alias in node.names]
            candidates = [c if c in known else module for c in candidates]
        else:
            continue
        found.update(candidates)
    return found - {""}


class Reading(NamedTuple):
    """What the tests ask of a module."""

    num_lines: int
    imports: set[str]
    long_functions: list[str]


@cache
def readings() -> dict[str, Reading]:
    """Read every module, once for all tests."""
    known, found = set(modules()), {}
    for name, path in modules().items():
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        found[name] = Reading(source.count("\n"), imported_modules(name, tree, known), long_functions(tree, 60))
    return found


def import_graph() -> dict[str, set[str]]:
    """Return the imports of every module."""
    return {name: reading.imports for name, reading in readings().items()}


def wrong_arrows(graph: dict[str, set[str]]) -> list[str]:
    """Return imports from a room above, or from an independent one."""
    return [
        f"{name} imports {target}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if target.split(".")[0] not in ROOMS[name.split(".")[0]]
    ]


def place_of(module: str, places: Iterable[str]) -> str:
    """Return the place of a module: itself, or the innermost sub-room."""
    parts = module.split(".")
    return next(place for n in range(len(parts), 0, -1) if (place := ".".join(parts[:n])) in places)


def arrows(graph: dict[str, set[str]], places: Iterable[str]) -> dict[str, set[str]]:
    """Return the places of the same room that each place imports, without the room's name."""
    found: dict[str, set[str]] = {place: set() for place in places}
    for name, targets in graph.items():
        if name.endswith("__init__"):
            continue
        here, room = place_of(name, found), name.split(".")[0]
        ours = {place_of(target, found) for target in targets if target.split(".")[0] == room}
        found[here] |= {place.removeprefix(f"{room}.") for place in ours - {here}}
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that lie on import cycles or lead only to them; empty without a cycle."""
    left = {name: targets & graph.keys() for name, targets in graph.items()}
    while free := {name for name, targets in left.items() if not targets}:
        left = {name: targets - free for name, targets in left.items() if name not in free}
    return sorted(left)


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_package_list_equals_the_folders():
    listed = setup_cfg()["options"]["packages"].split()
    folders = [".".join(("lockstep", *folder.relative_to(ROOT).parts)) for folder in package_folders()]
    assert listed == ["lockstep", *folders]


def test_every_data_file_beside_the_code_is_shipped():
    patterns = {k: v.replace(",", " ").split() for k, v in setup_cfg()["options.package_data"].items()}
    for folder in [*package_folders(), ROOT / "configs"]:
        package = "lockstep" if folder.name == "configs" else ".".join(("lockstep", *folder.relative_to(ROOT).parts))
        prefix = "configs/" if folder.name == "configs" else ""
        shipped = {path for pattern in patterns.get(package, []) for path in folder.glob(pattern.removeprefix(prefix))}
        others = {p for p in folder.iterdir() if p.is_file() and p.suffix not in {".py", ".pyc"}}
        assert others <= shipped, package


def test_rooms_import_only_what_stands_below_them():
    assert wrong_arrows(import_graph()) == []


def test_places_of_a_room_import_the_places_that_this_file_names_and_no_others():
    assert arrows(import_graph(), PLACES) == {place: set(targets.split()) for place, targets in PLACES.items()}


def test_arrows_between_places_run_downward():
    rooms = {place: place.split(".")[0] for place in PLACES}
    graph = {place: {f"{rooms[place]}.{target}" for target in PLACES[place].split()} for place in PLACES}
    assert cycle(graph) == []


@cache
def folders_of_tests() -> list[Path]:
    """Return the folders below tests/ that hold Python files."""
    return sorted({path.parent for path in (ROOT / "tests").rglob("*.py")})


def test_no_folder_holds_more_modules_than_one_can_survey():
    crowded = {}
    for folder in [*package_folders(), *folders_of_tests()]:
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if count > 18:
            crowded[folder.relative_to(ROOT).as_posix()] = count
    assert crowded == {}


def long_functions(tree: ast.AST, most_lines: int) -> list[str]:
    """Return functions of more lines than that, but for Triton's, which cannot be divided without cost."""
    functions = [n for n in statements(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function.name
        for function in functions
        if (function.end_lineno or 0) - function.lineno >= most_lines
        and not any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]


def test_modules_and_functions_have_a_size_that_one_can_read():
    long = {
        name: (reading.num_lines, reading.long_functions)
        for name, reading in readings().items()
        if reading.long_functions or reading.num_lines > 400
    }
    assert long == {}
    assert long_functions(ast.parse("def f():\n" + "    x = 1\n" * 60), 60) == ["f"]


def test_sources_in_other_languages_and_tests_have_such_a_size_too():
    # A module of tests is a list of cases that are read one by one, so it may be longer; its functions may not.
    limits = {path: 400 for suffix in ("cpp", "h") for path in (ROOT / "kernels").rglob(f"*.{suffix}")}
    limits |= dict.fromkeys((ROOT / "tests").rglob("*.py"), 750)
    texts = {path: path.read_text(encoding="utf-8") for path in limits}
    long = {path: text.count("\n") for path, text in texts.items() if text.count("\n") > limits[path]}
    assert {path.relative_to(ROOT).as_posix(): num_lines for path, num_lines in long.items()} == {}
    tests = {path: long_functions(ast.parse(text), 60) for path, text in texts.items() if path.suffix == ".py"}
    assert {path.relative_to(ROOT).as_posix(): names for path, names in tests.items() if names} == {}


def test_no_two_files_import_each_other_in_a_circle():
    assert cycle(import_graph()) == []


def test_the_checks_see_wrong_arrows_and_cycles():
    known = {"rollout.a", "rollout.b", "kernels.c", "weight_sync.d", "integration.e.f"}
    sources = {
        "rollout.a": "def f():\n    from .b import x\n    from ..weight_sync import d\n    import torch",
        "rollout.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a",
        "kernels.c": "import lockstep.rollout.a",
        "integration.e.f": "from ...kernels.c import y\nfrom lockstep.rollout import b",
    }
    graph = {name: imported_modules(name, ast.parse(source), known) for name, source in sources.items()}
    assert graph["integration.e.f"] == {"kernels.c", "rollout.b"}
    assert wrong_arrows(graph) == ["rollout.a imports weight_sync.d", "kernels.c imports rollout.a"]
    assert {"rollout.a", "rollout.b"} <= set(cycle(graph))
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_packages_have_an_init_with_nothing_but_a_docstring():
    # The one exception is the root's, which hands out the public names (tests/house/test_public_names.py).
    inits = [folder / "__init__.py" for folder in package_folders() if folder.name != "kernels"]
    for init in inits:
        body = ast.parse(init.read_text()).body
        assert len(body) == 1, f"{init} must hold a docstring and nothing else"
        assert isinstance(body[0], ast.Expr), f"{init} must hold a docstring and nothing else"
        assert ast.get_docstring(ast.parse(init.read_text()))


def test_kernels_and_tests_have_no_init_and_the_root_no_stray_module():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert [path.name for path in sorted(ROOT.glob("*.py"))] == ["__init__.py", "__main__.py"]


def test_imports_of_the_package_are_relative():
    absolute = [name for name, path in modules().items() if "import lockstep" in path.read_text()]
    absolute += [name for name, path in modules().items() if "from lockstep" in path.read_text()]
    assert absolute == []


@pytest.mark.parametrize("room", [*ROOMS, "integration.bench"])
def test_a_module_has_one_name(room):
    package = importlib.import_module(f"lockstep.{room}")
    assert [Path(path).resolve() for path in package.__path__] == [ROOT.joinpath(*room.split("."))]
    ours = {path.resolve() for path in modules().values()}
    names: dict[Path, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() in ours:
            names.setdefault(Path(file).resolve(), []).append(name)
    assert [found for found in names.values() if len(found) > 1] == []


def test_statements_are_found_wherever_they_stand():
    source = "\n".join(
        ["try:", " import a", "except E:", " import b", "else:", " import c", "finally:", " import d", "match x:",
         " case 1:", "  def f():", "   async with y:", "    import e", "if lambda: x:", " import f"]
    )  # fmt: skip
    found = {node.names[0].name for node in statements(ast.parse(source)) if isinstance(node, ast.Import)}
    assert found == set("abcdef")
