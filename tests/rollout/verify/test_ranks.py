"""Commits that verify, and renewed answers, on real ranks: the bits of one rank that had the weights from the start."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.speculation.drafting import record
from lockstep.tests.rollout.speculation.test_ranks import BATCHES, COMMON, PROMPTS
from lockstep.tests.rollout.verify.test_commit import changed
from lockstep.tests.support.covering import covering


@pytest.mark.slow
@covering(1, ranks=[(2, 1), (1, 2), (2, 2)], family=["llama", "qwen3_5"], speculation=["off", "auto"])
def test_replicas_verify_and_renew(small, run_world, bpe_tokenizer, ranks, family, speculation):
    model = small(family, **({"num_hidden_layers": 4} if family == "llama" else {}))
    tp, pp = ranks
    one = Engine(model, EngineConfig(speculation="off", **COMMON), tokenizer=bpe_tokenizer)
    old = [one.generate(PROMPTS, params, options=options) for params, options in BATCHES]
    with changed(model, "small"):
        one.weights.commit_weights("new", None)
        expected = [
            [record(answer) for answer in one.generate(PROMPTS, params, options=options)] for params, options in BATCHES
        ]
    one.close()

    def rank(rank: int) -> object:
        settings = {"tp": tp, "pp": pp, "speculation": speculation, **COMMON}
        with changed(model, "small"):
            engine = Engine(model, EngineConfig(**settings), tokenizer=bpe_tokenizer)
        engine.weights.commit_weights("new", None)
        renewed = [[record(answer) for answer in engine.renew(answers)] for answers in old]
        if not engine.is_controller:
            engine.follow()
            engine.close()
            return renewed, [], 0
        verified = []
        for params, options in BATCHES:
            ids = [
                id
                for prompt, its in zip(PROMPTS, params, strict=True)
                for id in engine.add(prompt, its, options=options)
            ]
            engine.mailboxes.open(ids, streamed=False)
            with engine.model.rollout_phase():
                for _ in range(7):
                    engine.step()
                engine.weights.commit_weights("new", None, in_flight="verify")
                while engine.has_work:
                    engine.step()
            verified.append([record(answer) for answer in engine.mailboxes.completions(ids)])
        num_verified = engine.metrics.num_verified_tokens
        engine.check_integrity()
        engine.dismiss()
        engine.close()
        return renewed, verified, num_verified

    torch.set_num_threads(1)
    (renewed, verified, num_verified), *others = run_world(tp * pp, rank)
    assert renewed == expected == verified
    assert all(its == expected for its, _, _ in others)
    assert num_verified > 60
