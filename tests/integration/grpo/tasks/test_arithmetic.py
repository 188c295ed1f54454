import random
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from lockstep.integration.grpo.rewards.ready import exact_answer
from lockstep.integration.grpo.tasks.arithmetic import (
    VOCAB_SIZE,
    ArithmeticSpec,
    arithmetic_problems,
    build_tokenizer,
    is_heldout,
    operands,
    worked_solution,
)
from lockstep.integration.grpo.tasks.problems import Problem


def canonical(problem):
    return tuple(sorted(operands(problem)))


def test_the_answer_is_the_ordinary_sum():
    for problem in arithmetic_problems(ArithmeticSpec(min_digits=2, max_digits=4)).heldout:
        a, b = operands(problem)
        assert problem.answer == str(a + b)
        assert min(a, b) >= 10 and max(a, b) < 10_000


def test_heldout_problems_are_distinct_and_the_same_for_every_seed():
    heldout = arithmetic_problems(ArithmeticSpec(seed=0)).heldout
    assert len({canonical(problem) for problem in heldout}) == len(heldout) == 512
    assert heldout == arithmetic_problems(ArithmeticSpec(seed=1)).heldout


def test_training_never_draws_a_heldout_pair_in_either_order():
    # Two-digit operands have so few pairs that a held-out pair in training would be found.
    data = arithmetic_problems(ArithmeticSpec(min_digits=2, max_digits=2, num_heldout=100))
    heldout = {canonical(problem) for problem in data.heldout}
    trained = {canonical(problem) for step in range(-20, 20) for problem in data.train_problems(step, 256)}
    assert len(trained) > 3000
    assert not heldout & trained
    assert all(is_heldout(a, b, data.spec.heldout_one_in) for a, b in heldout)


def test_both_orders_of_a_sum_are_on_one_side_of_the_split():
    pairs = [(a, b) for a in range(100, 140) for b in range(100, 140)]
    assert all(is_heldout(a, b, 16) == is_heldout(b, a, 16) for a, b in pairs)
    share = sum(is_heldout(a, b, 16) for a, b in pairs) / len(pairs)
    assert 0.03 < share < 0.1


def test_problems_of_a_step_depend_on_seed_and_step_only():
    data = arithmetic_problems(ArithmeticSpec(seed=5))
    problems = data.train_problems(17, 64)
    assert len({canonical(problem) for problem in problems}) == 64
    data.train_problems(3, 10)
    random.random()
    assert data.train_problems(17, 64) == problems
    assert data.train_problems(18, 64) != problems
    assert arithmetic_problems(ArithmeticSpec(seed=6)).train_problems(17, 64) != problems


def test_another_process_with_another_hash_seed_draws_the_same_problems():
    script = (
        "from lockstep.integration.grpo.tasks.arithmetic import *; import hashlib;"
        "d = arithmetic_problems(ArithmeticSpec());"
        "print(hashlib.sha256(repr((d.heldout, d.train_problems(3, 32))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


def test_a_worked_solution_writes_columns_from_the_ones_upwards_and_then_the_sum():
    assert worked_solution(Problem("What is 347 + 285?\n", "632")) == "12 13 06=632"
    assert worked_solution(Problem("What is 27 + 985?\n", "1012")) == "12 11 10=1012"
    assert worked_solution(Problem("What is 99 + 99?\n", "198")) == "18 19=198"


def test_worked_solutions_without_slips_are_right():
    for problem in arithmetic_problems(ArithmeticSpec(min_digits=2, max_digits=4)).heldout:
        assert exact_answer(problem.prompt, worked_solution(problem), problem.answer) == 1.0


def test_a_pupil_who_always_slips_forgets_every_carry():
    rng = random.Random(0)
    assert worked_solution(Problem("What is 347 + 285?\n", "632"), 1.0, rng) == "12 12 05=522"
    assert worked_solution(Problem("What is 999 + 999?\n", "1998"), 1.0, rng) == "18 18 18=1888"
    assert worked_solution(Problem("What is 123 + 456?\n", "579"), 1.0, rng) == "09 07 05=579"


def test_slips_happen_at_their_rate():
    rng = random.Random(0)
    one_carry = Problem("What is 108 + 104?\n", "212")
    num_right = sum(worked_solution(one_carry, 0.7, rng) == "12 01 02=212" for _ in range(2000))
    assert 0.26 < num_right / 2000 < 0.34
    with pytest.raises(ValueError, match=r"slip_rate=0.7"):
        worked_solution(one_carry, 0.7)


def test_every_fault_of_a_spec_is_named():
    with pytest.raises(ValueError, match=r"min_digits.*num_heldout.*heldout_one_in"):
        ArithmeticSpec(min_digits=1, num_heldout=0, heldout_one_in=1)
    with pytest.raises(ValueError, match="over half"):
        ArithmeticSpec(min_digits=2, max_digits=2, num_heldout=512)


@pytest.fixture(scope="module", params=["built", "reloaded"])
def tokenizer(request, tmp_path_factory):
    tokenizer = build_tokenizer()
    if request.param == "built":
        return tokenizer
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_texts_survive_the_tokenizer(tokenizer):
    text = "What is 347 + 285?\n12 13  06=632 <x> ~"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]


def test_every_id_decodes_and_unknown_characters_are_one_token(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.decode([index]) for index in range(VOCAB_SIZE))
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4


def test_every_prompt_fills_more_than_one_block_of_16_tokens(tokenizer):
    data = arithmetic_problems(ArithmeticSpec(min_digits=2, max_digits=2, num_heldout=100))
    assert min(len(tokenizer(problem.prompt).input_ids) for problem in data.heldout) >= 18
