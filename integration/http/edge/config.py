"""Settings of the HTTP server: its address, its keys, its limits, and the names that it reports."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

API_KEY_VARIABLES = ("LOCKSTEP_API_KEY",)
TOOL_CALL_PARSERS = (
    "none", "hermes", "qwen", "qwen25", "qwen3_coder", "qwen3_xml", "qwen3_5", "llama3_json", "llama3", "llama4_json",
    "mistral", "deepseek_v3", "deepseekv3", "deepseek_r1", "deepseek_v31", "deepseekv31", "glm45", "glm47", "glm",
    "gpt-oss", "openai", "harmony",
)  # fmt: skip
REASONING_PARSERS = (
    "none", "qwen3", "think", "glm45", "deepseek_v3", "deepseek_r1", "deepseek-r1", "qwen3-thinking", "mistral",
    "gpt-oss", "openai_gptoss", "harmony",
)  # fmt: skip
ADMIN_KEY_VARIABLES = ("LOCKSTEP_ADMIN_KEY", "SGLANG_OMNI_ADMIN_KEY")

_POSITIVE = (
    "max_body_bytes", "max_control_body_bytes", "max_open_body_bytes", "max_body_lists", "max_head_bytes",
    "max_headers", "body_timeout_s", "max_prompts", "max_sequences", "max_stop_bytes", "max_stop_token_ids",
    "max_logit_bias", "max_top_logprobs", "max_listed_logprobs", "max_kept_token_ids", "max_logprob_entries",
    "max_open_logprob_entries", "max_waiting_requests",
    "max_waiting_tokens", "max_sessions", "max_session_bytes", "session_idle_s",
    "max_tokenising_chars", "max_admin_calls", "max_connections", "head_timeout_s",
    "idle_timeout_s", "write_timeout_s", "refusal_timeout_s", "update_idle_s", "stall_timeout_s", "drain_timeout_s",
    "shutdown_timeout_s", "max_tools", "max_tools_bytes",
    "max_images", "max_image_bytes", "max_image_pixels", "max_kept_image_bytes",
    "max_open_image_bytes",
    "max_grammar_bytes", "max_grammar_nesting", "max_pattern_bytes", "max_grammar_repeats", "max_grammar_alternatives",
)  # fmt: skip
_FINITE = ("idle_timeout_s", "drain_timeout_s", "shutdown_timeout_s")  # a server that ends waits for them


@dataclass(frozen=True)
class HttpConfig:
    """Settings of one server. A key that is None is read from the environment; "" means no key. Raises ValueError that
    names every wrong setting, and never contains a key."""

    host: str = "127.0.0.1"  # address to listen on; an address other than loopback needs an admin key
    port: int = 30000  # 0: a free port
    api_key: str | None = field(default=None, repr=False)  # else LOCKSTEP_API_KEY
    admin_api_key: str | None = field(default=None, repr=False)  # else LOCKSTEP_ADMIN_KEY or SGLANG_OMNI_ADMIN_KEY
    model_name: str | None = None  # the name in /v1/models; None: the model's path, or its class
    model_path: str | None = None  # source of the weights; None: the module's `name_or_path`
    processor_path: str | None = None  # folder of the processor of images; None: the model's
    stage: str = "rollout"  # the name by which `stages` in an admin body selects this engine
    extra_server_args: Mapping[str, object] = field(default_factory=dict, repr=False)  # echoed in /server_info
    max_body_bytes: int = 32 << 20  # of a request; pickled payloads have the service's own limit
    max_control_body_bytes: int = 1 << 20  # of a call that carries no data: pause, abort, memory, profile
    max_open_body_bytes: int = 512 << 20  # of all bodies that arrive or are parsed now, payloads apart; beyond: 503
    max_body_lists: int = 1 << 18  # lists and objects in one body, with the keys of long objects
    body_timeout_s: float = 120.0  # within which a whole body must arrive
    max_prompts: int = 4096  # of a request
    max_sequences: int = 4096  # of a request: prompts times samples
    max_stop_bytes: int = 1 << 16  # of all stop strings of a prompt
    max_stop_token_ids: int = 1024  # of a prompt
    max_logit_bias: int = 1 << 14  # entries of a prompt's logit_bias; never more than the vocabulary has
    max_top_logprobs: int = 128  # likeliest tokens at each position
    max_listed_logprobs: int = 1024  # tokens of token_ids_logprob, at each position
    max_kept_token_ids: int = 1 << 18  # of return_top_p_token_ids, of an answer, which ends beyond
    max_logprob_entries: int = 4 << 20  # of a request; an output position without alternatives is an eighth
    max_open_logprob_entries: int = 16 << 20  # of all requests until their answers are sent; beyond: 503
    max_waiting_requests: int = 1 << 15  # sequences that wait; beyond: 503
    max_waiting_tokens: int = 64 << 20  # of prompts and drafts of open requests, for each sample; beyond: 503
    max_sessions: int = 10_000  # conversations whose tokens are kept; beyond: 503
    max_session_bytes: int = 1 << 30  # of all sessions, without outputs under way; beyond: 503 for requests on them
    session_idle_s: float = 3600.0  # a session that nothing uses for so long ends, or sooner where it asks for that
    max_tokenising_chars: int = 4 << 20  # of texts that are tokenised at a time, at about 150 bytes of memory each
    max_images: int = 64  # of a request
    max_image_bytes: int = 16 << 20  # of an image as it is sent, out of its base64
    max_image_pixels: int = 1 << 25  # of all images of a request together; checked before any is decoded
    max_kept_image_bytes: int = 1 << 30  # of what the processor made of images, kept for the same prompts again
    max_open_image_bytes: int = 8 << 30  # of images of all requests until their answers are sent; beyond: 503
    max_tools: int = 512  # of a request
    max_tools_bytes: int = 2**18  # of their JSON together
    tool_call_parser: str | None = None  # form of tool calls in answers; None: by the chat template, "none": no form
    reasoning_parser: str | None = None  # form of reasoning, likewise
    max_grammar_bytes: int = 2**18  # of a json_schema, regex, ebnf or structural_tag
    max_grammar_nesting: int = 64  # levels of a schema; parentheses of a pattern or an ebnf within one another
    max_pattern_bytes: int = 2**14  # of a pattern inside a schema
    max_grammar_repeats: int = 100_000  # repeats that a grammar may demand: {n}, minLength, minItems, minProperties
    max_grammar_alternatives: int = 10_000  # of all enums, unions and bars of a grammar together
    max_admin_calls: int = 64  # administrative calls that run at a time; further calls wait
    max_connections: int = 1 << 14  # open ones, at most 3/4 of the process's descriptors; beyond, idle ones are closed
    max_head_bytes: int = 1 << 14  # of a request's line and headers; beyond: 431
    max_headers: int = 100  # of a request; beyond: 431
    head_timeout_s: float = 30.0  # within which a request's head must arrive
    idle_timeout_s: float = 5.0  # a connection without a request is closed after it
    write_timeout_s: float = 600.0  # a client that reads nothing of its answer is cut off after it
    refusal_timeout_s: float = 300.0  # requests wait so long for weights that were released and not written since: 503
    update_idle_s: float = 600.0  # an update by vLLM's calls is taken back if its client makes none for so long
    stall_timeout_s: float = 600.0  # a step that takes longer makes the health check fail
    drain_timeout_s: float = 20.0  # seconds in which open requests and an update may finish when the server ends
    shutdown_timeout_s: float = 5.0  # seconds that calls may still run when the server ends, after draining

    def __post_init__(self) -> None:
        for name, variables in (("api_key", API_KEY_VARIABLES), ("admin_api_key", ADMIN_KEY_VARIABLES)):
            key = getattr(self, name)
            if key is None:
                key = next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)
            object.__setattr__(self, name, key or None)
        if self.host.startswith("[") and self.host.endswith("]"):  # as an URL has an address of IPv6
            object.__setattr__(self, "host", self.host[1:-1])
        wrong = [
            f"{name} must be printable and without blanks"
            for name in ("api_key", "admin_api_key")
            if (key := getattr(self, name)) and not (key.isprintable() and not any(map(str.isspace, key)))
        ]
        wrong += [
            f"{name} must be positive, not {getattr(self, name)!r}" for name in _POSITIVE if not getattr(self, name) > 0
        ]
        wrong += [f"{name} must be finite" for name in _FINITE if getattr(self, name) == math.inf]
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if (given := getattr(self, name)) is not None and given not in known:
                wrong.append(f"{name} must be one of {', '.join(known)}, not {given!r}")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 65536:
            wrong.append(f"port must be from 0 to 65535, not {self.port!r}")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server; False for every host name but localhost."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check_bind(self) -> None:
        """Refuse an address other than loopback without an admin key. Raises ValueError that names the remedy."""
        if not self.is_loopback and not self.admin_api_key:
            raise ValueError(
                f"refusing to listen on {self.host!r} without an admin key: any client could replace the "
                f"weights. Set an admin key (--admin-api-key, or the environment's {ADMIN_KEY_VARIABLES[0]}), or "
                "listen on 127.0.0.1"
            )
