"""A server of which trainers want to change the weights, and what it must answer with those of each step."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.http.vllm.weight_trainer import KEY, PATIENCE, Named, Trainer, model_of
from lockstep.tests.support.callers import wait_until
from lockstep.weight_sync.digests.checker import checksum

SOON_S = 12.0  # within which a fault must have ended, far less than a trainer's own limit of 30 s
PROMPT = [5, 17, 9]


@dataclass(frozen=True)
class Weights:
    """The weights of a step, and what an engine that has them answers."""

    digest: str
    checksums: dict[str, str]
    ids: list[int]
    logprobs: list[float]


class References:
    """An engine in this process, which takes the weights of each step."""

    def __init__(self, folder: str) -> None:
        self._service = RolloutService(Engine(folder, EngineConfig(kv_cache="16 blocks", max_num_seqs=4)))
        self._known: dict[int, Weights] = {}

    def of(self, step: int) -> Weights:
        if step not in self._known:
            self._service.update_weights_from_named_tensors(model_of(step))
            self._service.commit_implicit_update()
            params = SamplingParams(max_new_tokens=8, sampling_seed=3, ignore_eos=True)
            [made] = self._service.engine.generate([PROMPT], params)
            sums = checksum(self._service.engine.model.resident_tensors()).tensors
            self._known[step] = Weights(self._service.model_digest(), sums, list(made.token_ids), list(made.logprobs))
        return self._known[step]

    def close(self) -> None:
        self._service.close()


class Stage:
    """A server, the weights that it has, and a trainer that wants to bring others."""

    def __init__(self, url: str, references: References) -> None:
        self.url, self.references = url, references
        self.client = httpx.Client(base_url=url, timeout=PATIENCE, headers=KEY)
        self.old, self.step = 0, 0
        self.trainers: list[Trainer] = []

    def trainer(self, **options: object) -> Trainer:
        self.trainers.append(Trainer(self.url, **options))
        return self.trainers[-1]

    @property
    def newer(self) -> Named:
        return model_of(self.step)

    def post(self, path: str, body: dict | None = None, status: int = 200) -> dict:
        answer = self.client.post(path, json=body or {})
        assert answer.status_code == status, f"{path}: {answer.status_code}: {answer.text}"
        return answer.json()

    def starts(self, **options: object) -> Trainer:
        """Join, pause and start, as every update does."""
        trainer = self.trainer(**options)
        trainer.post("/pause?mode=keep&clear_cache=false")
        trainer.post("/start_weight_update")
        return trainer

    def land(self) -> None:
        """Bring the weights of the step, from init to shutdown."""
        trainer = self.starts()
        half = len(self.newer) // 2
        for part in (self.newer[:half], self.newer[half:]):
            assert trainer.send(part).status_code == 200
        trainer.post("/finish_weight_update", {"weight_version": str(self.step)})
        trainer.post("/resume")
        trainer.close()
        self.old = self.step

    def is_updating(self) -> bool:
        """Return whether a call that writes weights runs. Asks without taking its turn."""
        return self.client.get("/state").json()["update_age_s"] is not None

    def next(self) -> None:
        for trainer in self.trainers:  # of a fault that failed
            trainer.leave()
        self.trainers.clear()
        self.step = self.old + 1

    def check(self, expected: str) -> None:
        """Check that the weights are the old or the new ones, whole, and that the server generates from them."""
        wait_until(lambda: self.state()["state"] != "open", SOON_S, "the update ends")
        for trainer in self.trainers:
            trainer.leave()
        self.trainers.clear()
        self.post("/resume")
        steps = {"old": [self.old], "new": [self.step], "either": [self.old, self.step]}[expected]
        digest = self.post("/model_info")["weight_digest"]
        by_digest = {self.references.of(step).digest: step for step in steps}
        assert digest in by_digest, f"neither old nor new, or not the {expected} ones"
        self.old = by_digest[digest]
        weights = self.references.of(self.old)
        assert self.post("/weight_checker", {"action": "compare", "baseline": weights.checksums}) == {
            "match": True, "mismatches": []
        }  # fmt: skip
        params = {"max_tokens": 8, "seed": 3, "ignore_eos": True, "logprobs": 0}
        [choice] = self.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})["choices"]
        assert choice["token_ids"] == weights.ids
        assert [at["logprob"] for at in choice["logprobs"]["content"]] == weights.logprobs

    def state(self) -> dict:
        return self.client.get("/state").json()["weight_update"]
