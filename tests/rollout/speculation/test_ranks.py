"""Drafts on real ranks: parts of the weights and stages of the layers give the bits of one rank without drafts."""

from __future__ import annotations

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import Oracle, counts, draft_always, record
from lockstep.tests.support.covering import covering

COMMON = {"k_blocks": 4, "kv_cache": 64, "max_num_batched_tokens": 256, "chunked_prefill_size": 32,
          "rank_timeout_s": 60.0, "state_check_steps": 1}  # fmt: skip
PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(100, 180)), [9] * 20]
SIMPLE = [SamplingParams(max_new_tokens=20, temperature=t, sampling_seed=s) for s, t in enumerate((0.0, 1.0, 0.5, 1.0))]
SHAPED = [
    SamplingParams(max_new_tokens=20, temperature=1.0, sampling_seed=0, n=2),
    SamplingParams(max_new_tokens=19, temperature=0.0, logit_bias={7: 2.0}, min_new_tokens=3),
    SamplingParams(max_new_tokens=17, temperature=0.7, sampling_seed=2, frequency_penalty=0.5, top_k=20),
    SamplingParams(max_new_tokens=20, sampling_seed=4, json_schema={"enum": ["one value", "the other"]},
                   jump_forward="off"),
]  # fmt: skip
BATCHES = ((SIMPLE, RequestOptions()), (SHAPED, RequestOptions(top_logprobs_num=2, token_ids_logprob=(3, 4))))


class ByPrompt(Oracle):
    """An oracle that knows the outputs by prompt and number of the sample."""

    def propose(self, request, most: int):
        sequence = request.sequence
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        self.outputs = {**self.outputs, request.id: self.outputs.get((prompt, request.index), ())}
        return super().propose(request, most)


@pytest.mark.slow
@covering(
    1, ranks=[(2, 1), (1, 2), (2, 2)], family=["llama", "qwen3_5"], spoil=["right", "any"],
    settings=[{}, {"kv_cache": 14}],
)  # fmt: skip
def test_a_replica_with_drafts_gives_the_bits_of_one_rank_without(
    small, run_world, bpe_tokenizer, ranks, family, spoil, settings
):
    model = small(family, **({"num_hidden_layers": 4} if family == "llama" else {}))
    tp, pp = ranks

    off = Engine(model, EngineConfig(speculation="off", **COMMON), tokenizer=bpe_tokenizer)
    expected = [
        [record(answer) for answer in off.generate(PROMPTS, params, options=options)] for params, options in BATCHES
    ]
    off.close()

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=tp, pp=pp, **{**COMMON, **settings}), tokenizer=bpe_tokenizer)
        found = []
        oracle = ByPrompt({}, VOCAB, spoil)
        if engine.is_controller:
            draft_always(engine, oracle)
        for (params, options), wanted in zip(BATCHES, expected, strict=True):
            oracle.outputs = {(one[0], one[1]): one[2] for one in wanted}
            prompts = PROMPTS if engine.is_controller else None
            found.append([record(c) for c in engine.generate(prompts, params, options=options)])
        num_accepted = counts(engine)[1]
        engine.check_integrity()
        engine.close()
        return found, num_accepted

    (found, num_accepted), *others = run_world(tp * pp, rank)
    assert found == expected and num_accepted > 40
    assert all(its == expected for its, _ in others)
