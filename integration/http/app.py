"""The application: all endpoints over one service."""

from __future__ import annotations

from fastapi import FastAPI

from ..service import RolloutService
from ..version import version
from .admin import attendance, cache, control, lora, profile, unsupported, updates, verbs, weights
from .admin.common import DOCUMENTED
from .admin.flushes import Flushes
from .admin.operations import Operations, UpdateGate
from .admin.recorder import Profiler
from .chat import parsing
from .conversations import verbs as conversation_verbs
from .conversations.pins import SessionPins
from .conversations.store import Sessions
from .edge import errors
from .edge.auth import AuthMiddleware
from .edge.config import HttpConfig
from .edge.session_paths import SessionPaths
from .edge.threads import Threads
from .edge.turns import TurnsMiddleware
from .generation import generate
from .messages import api as messages_api
from .observe import debug_page, health, loads, metrics, model_info, rollouts, server_info, state
from .observe.traffic import Traffic, TrafficMiddleware
from .openai import api as openai_api
from .responses import api as responses_api
from .vllm import areal, plain_generate, tokens
from .vllm import checker as vllm_checker
from .vllm import control as vllm_control
from .vllm import generate as vllm_generate
from .vllm import rpc as vllm_rpc
from .vllm import weights as vllm_weights
from .vllm.transfers import Broadcasts
from .vllm.update_watch import UpdateWatch

ROUTERS = (
    generate,
    openai_api,
    messages_api,
    responses_api,
    conversation_verbs,
    vllm_generate,
    plain_generate,
    vllm_control,
    vllm_weights,
    vllm_checker,
    vllm_rpc,
    areal,
    tokens,
    parsing,
    health,
    model_info,
    server_info,
    state,
    loads,
    control,
    weights,
    updates,
    lora,
    cache,
    profile,
    attendance,  # before the verbs, whose path has a parameter
    verbs,
    metrics,
    debug_page,
    rollouts,
    unsupported,
)


def create_app(
    service: RolloutService, config: HttpConfig | None = None, kept_samples: rollouts.Rollouts | None = None, *,
    only_sessions: bool = False,
) -> FastAPI:  # fmt: skip
    """Make the HTTP application of a service. The caller must run the engine's loop; `server` starts it.

    kept_samples: those of the run of the job that the engine belongs to, by step, as their page shows them.
    only_sessions: it answers paths of sessions alone, which this process opens in `app.state.conversations`.

    Handlers find in `app.state`: service, config, reads, operations and waits (they run blocking calls, waits those
    that last until requests have ended), updates (the gate),
    attendance (of clients of updates), flushes, conversations (their sessions), profiler, scrapes, traffic,
    plain_paths (paths without parameters), is_draining (the server takes no new requests), is_closing (it is about to
    end), is_asleep (vLLM's /sleep was called), weight_way, weights_told (the tensors of the last update) and
    update_watch (of vLLM's updates), areal_tensors (those that AReaL's next update receives), rollouts
    (`kept_samples`). A server adds its `connections`.
    """
    config = config or HttpConfig()
    app = FastAPI(title="Lockstep", version=version(), docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.config = config
    app.state.reads = Threads(config.max_admin_calls)  # separate: reports are answered while all operations wait
    app.state.operations = Operations(Threads(config.max_admin_calls), service.engine.driver.once_per_id)
    app.state.waits = Threads(config.max_admin_calls)
    app.state.attendance = attendance.Attendance(service, Threads(config.max_admin_calls))
    app.state.updates = UpdateGate()
    app.state.profiler = Profiler(service.engine)
    app.state.traffic = Traffic()
    app.state.flushes = Flushes(service.engine, app.state.reads)
    app.state.conversations = Sessions(config)
    app.state.conversations.is_opened_by_requests = not only_sessions
    SessionPins(service.engine, app.state.conversations, app.state.reads)
    app.state.is_closing = app.state.is_draining = app.state.is_asleep = False
    app.state.weight_way, app.state.weights_told, app.state.areal_tensors = Broadcasts(None), (), None
    app.state.update_watch = UpdateWatch(service, app.state.updates, config.update_idle_s)
    app.state.rollouts = kept_samples
    app.state.updated_from = None  # the folder of the last update from disk
    app.state.scrapes = metrics.Scrapes(service, config, app.state.traffic, app.state.conversations)
    for module in ROUTERS:
        app.include_router(module.router, responses=DOCUMENTED)
    routes = [route for module in ROUTERS for route in module.router.routes]
    app.state.plain_paths = frozenset(path for route in routes if "{" not in (path := getattr(route, "path", "{")))
    errors.install(app)
    app.add_middleware(AuthMiddleware, config=config)
    app.add_middleware(errors.EndingMiddleware)
    app.add_middleware(TrafficMiddleware, traffic=app.state.traffic)
    app.add_middleware(SessionPaths, only=only_sessions)
    app.add_middleware(TurnsMiddleware)  # the outermost: hundreds that arrive at once take a turn before all else
    return app
