"""Random sequences of administrative verbs beside requests; each ends in a usable state, which is checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.tests.torture.attackers import Attacker, Scene
from lockstep.tests.torture.wire import Answer, Wire

USABLE_S = 30.0  # within which a restored server must answer a request
Step = Callable[["Verbs", random.Random], None]


def restore(wire: Wire, scene: Scene) -> None:
    """Undo what administrative verbs may have left: a profile, a session, released memory, other weights, a pause."""

    def post(verb: str, **body: object) -> Answer:
        return wire.call("POST", f"/{verb}", body, admin=True, name=f"restore: {verb}")

    post("stop_profile")
    if scene.has("/abort_weight_update"):
        post("abort_weight_update")
    post("resume_memory_occupation")
    if scene.model_folder:
        post("update_weights_from_disk", model_path=scene.model_folder)
    post("continue_generation")


def is_usable(wire: Wire, scene: Scene) -> bool:
    """Check that a request is answered soon, and note it where it is not."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    began, answer = time.monotonic(), Answer(0, b"")
    while time.monotonic() - began < USABLE_S and not scene.over.is_set():
        answer = wire.call("POST", "/generate", body, name="usable?")
        if answer.status == 200:
            return True
        scene.over.wait(0.2)  # 503: others wait before it
    if not scene.over.is_set():
        wire.tell("unusable", f"after the verbs of {wire.attacker}", answer, [f"{wire.attacker}:{wire.step}"])
    return scene.over.is_set()


class Verbs(Attacker):
    """Act as an administrator with short sequences of every verb, while requests run."""

    name = "verbs"
    needs_admin = True

    def step(self, draw: random.Random) -> None:
        with self.scene.admin_turn:
            asking = [self._ask_beside(draw) for _ in range(draw.randint(0, 3))]
            try:
                for _ in range(draw.randint(2, 7)):
                    if not self.scene.over.is_set():
                        draw.choice(ACTIONS)(self, draw)
            finally:
                restore(self.wire, self.scene)
            is_usable(self.wire, self.scene)
            for thread in asking:
                thread.join()

    def verb(self, verb: str, **body: Any) -> Answer:
        """Call a verb, if the server has it."""
        if not self.scene.has(f"/{verb}"):
            return Answer(404, b"")
        return self.wire.call("POST", f"/{verb}", body, admin=True, name=f"{verb} {body}"[:150])

    def _ask_beside(self, draw: random.Random) -> threading.Thread:
        params = {"max_new_tokens": draw.choice([5, 100]), "ignore_eos": True, "sampling_seed": 3}
        body = {"input_ids": [draw.randrange(2, 90)] * 20, "sampling_params": params, "rid": f"beside-{draw.random()}"}
        thread = threading.Thread(target=self.wire.call, args=("POST", "/generate", body), daemon=True)
        thread.start()
        return thread


def _pause(on: Verbs, draw: random.Random) -> None:
    options = draw.choice([{}, {"ttl": 0.5}, {"timeout_s": 0.01}, {"op_id": f"pause-{draw.randrange(5)}"}])
    on.verb("pause_generation", mode=draw.choice(["retract", "in_place", "abort"]), **options)


def _resume(on: Verbs, draw: random.Random) -> None:
    on.verb("continue_generation", **draw.choice([{}, {"timeout_s": 0.01}]))


def _flush(on: Verbs, draw: random.Random) -> None:
    on.wire.call("POST", f"/flush_cache?timeout={draw.choice([0, 0.3])}", {}, admin=True, name="flush_cache")


def _abort(on: Verbs, draw: random.Random) -> None:
    on.verb("abort_request", **draw.choice([{"rid": "none"}, {"rid": ""}, {"abort_all": True}]))


def _memory(on: Verbs, draw: random.Random) -> None:
    tags = draw.choice([[], ["kv_cache"], ["weights"], ["cuda_graph"], ["none"]])
    on.verb(draw.choice(["release_memory_occupation", "resume_memory_occupation"]), tags=tags)


def _load(on: Verbs, draw: random.Random) -> None:
    if on.scene.model_folder:
        options = {"abort_all_requests": draw.random() < 0.2, "keep_running": draw.random() < 0.5,
                   "weight_version": f"v{draw.randrange(9)}", "flush_cache": draw.random() < 0.5}  # fmt: skip
        if draw.random() < 0.4:  # the same weights: every token that is drawn again is the one that was there
            options = {"in_flight": "verify", "weight_version": f"v{draw.randrange(9)}"}
        on.verb("update_weights_from_disk", model_path=on.scene.model_folder, **options)


def _session(on: Verbs, draw: random.Random) -> None:
    on.verb("begin_weight_update", **draw.choice([{}, {"lease_s": 0.2}, {"undo": "none"}, {"digest": "later"}]))
    for _ in range(draw.randint(0, 2)):
        draw.choice([_pause, _resume, _abort, _memory, _flush])(on, draw)
    on.verb(draw.choice(["abort_weight_update", "end_weight_update", "verify_weight_update", "revert_weight_update"]))


def _group(on: Verbs, draw: random.Random) -> None:
    name = f"g{draw.randrange(3)}"
    on.verb("init_weights_update_group", master_address="127.0.0.1", master_port=draw.randrange(20000, 60000),
            rank_offset=1, world_size=2, group_name=name, backend="gloo", timeout_s=0.3)  # fmt: skip
    on.verb("destroy_weights_update_group", group_name=draw.choice([name, "g0"]))


def _pins(on: Verbs, draw: random.Random) -> None:
    prompt = [draw.randrange(2, 90)] * 20
    on.verb("hicache/pin_prefix", token_ids=prompt, owner="storm", ttl_seconds=draw.choice([0.1, 2]))
    hashes = draw.choice([[], [1], [-(2**63)], [2**63 - 1]])
    on.verb(draw.choice(["hicache/pin_blocks", "hicache/unpin_blocks"]), block_hashes=hashes, owner="storm")
    on.verb("hicache/evict_descendants", block_hash=draw.choice([0, 1, -1]))
    on.verb("hicache/cache_tree", depth=draw.choice([1, 2**31]))


def _profile(on: Verbs, draw: random.Random) -> None:
    on.verb("start_profile", output_dir=str(on.scene.scratch / "profile"), num_steps=draw.choice([1, 3, 10**9]))
    if draw.random() < 0.5:
        on.verb("stop_profile")


def _weights(on: Verbs, draw: random.Random) -> None:
    on.verb("weights_checker", action=draw.choice(["checksum", "snapshot", "compare", "none"]))
    on.verb("get_weights_by_name", name=draw.choice(["model.embed_tokens.weight", "lm_head.weight", "none"]))
    on.verb("update_weight_version", new_version=draw.choice(["a", "b"]), abort_all_requests=draw.random() < 0.2)
    on.verb(draw.choice(["release_weight_undo", "finish_digest", "revert_weight_update", "post_process_weights"]))


ACTIONS: tuple[Step, ...] = (
    _pause, _resume, _flush, _abort, _memory, _load, _session, _group, _pins, _profile, _weights,
)  # fmt: skip
