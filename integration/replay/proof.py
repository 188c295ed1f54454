"""The proof of receipts with the engine of a service: checks without the model first, then draws in prefills.

Each receipt is checked in this order: its hash, its fields, the guarantee against this machine's, the end of its
output, its weights. What is left is drawn again: in large prefills (`rollout/proving`), or, where draws were replaced
by jumps, layers are recurrent or ranks share the model, by the engine itself, as it renews answers of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...rollout.completion import UNNAMED_VERSION, Completion, DrawnWith
from ...rollout.proving.claim import Claim, Verdict, claim_of, unproven
from ...rollout.proving.fields import wrong_fields
from ...rollout.proving.layout import Task
from ...rollout.proving.own_settings import needs_own
from ...rollout.proving.prover import NoWeights, Prover
from ...rollout.receipt import (
    GRAMMAR_SETTINGS,
    HASH,
    Guarantee,
    batch_hash,
    breaks_in_chain,
    differences,
    guarantee,
    num_absent,
    seal_is_whole,
)
from ...rollout.request_options import RequestOptions
from ...rollout.sampling_params import SamplingParams
from .claimed_images import ClaimedImages
from .comparison import compared
from .cut_answers import first_replaced
from .report import ReplayReport, ids_of

if TYPE_CHECKING:
    from ...rollout.engine import Engine

Receipt = Mapping[str, Any]
OnProgress = Callable[[int], object]  # takes a number of samples that are done


class WeightSource(Protocol):
    """The weights that a replay has at hand, by their digests."""

    def has(self, digest: str) -> bool:
        """Return whether weights of this digest are at hand."""
        ...

    def versions(self, digest: str) -> Collection[str]:
        """Return the versions that these weights are known to have had; empty: not known."""
        ...

    def hint(self, digest: str) -> str:
        """Return what to say of weights that are not at hand, as an end of a sentence; "": nothing."""
        ...

    def switch(self, digest: str) -> None:
        """Make these weights the engine's. Raises NoWeights where they cannot be loaded, or turn out to be others."""
        ...


def replay(
    engine: Engine,
    receipts: Sequence[Receipt],
    source: WeightSource,
    *,
    prompts: Iterable[Mapping[str, Any]] = (),
    anyway: bool = False,
    on_progress: OnProgress = lambda num: None,
) -> ReplayReport:
    """Prove receipts; returns a verdict on each, in order. prompts: with the images of the receipts'; anyway: also
    where the guarantee is another one here."""
    images = ClaimedImages(engine, prompts)
    run = _Replay(engine, source, guarantee(engine.model), images, anyway, on_progress)
    verdicts = run.verdicts(receipts)
    sealed = [receipt for receipt in receipts if not wrong_fields(receipt) and isinstance(receipt.get(HASH), str)]
    return ReplayReport(
        ids_of(receipts),
        tuple(verdicts),
        tuple(run.differing),
        tuple(run.versions),
        tuple(breaks_in_chain(sealed)),
        batch_hash(sealed),
        num_absent(sealed),
    )


class _Replay:
    """One call of `replay`."""

    def __init__(
        self, engine: Engine, source: WeightSource, here: Guarantee, images: ClaimedImages, anyway: bool,
        on_progress: OnProgress,
    ) -> None:  # fmt: skip
        self._engine, self._source, self._here, self._anyway = engine, source, here, anyway
        self._on_progress, self._images = on_progress, images
        self._has_prover = engine.ranks.mesh.num_ranks == 1 and not engine.model.has_states
        self.differing: dict[str, None] = {}  # in the order in which they were found
        self.versions: dict[str, None] = {}
        self._known: dict[str, list[str]] = {}  # what differs, by the hash of a guarantee

    def verdicts(self, receipts: Sequence[Receipt]) -> list[Verdict]:
        """Return a verdict on each receipt."""
        found: list[Verdict | None] = []
        claims: dict[int, Claim] = {}
        for number, receipt in enumerate(receipts):
            claim = self._checked(receipt)
            found.append(claim if isinstance(claim, Verdict) else None)
            if isinstance(claim, Claim):
                claims[number] = claim
        self._on_progress(len(receipts) - len(claims))
        by_prefill = {n: claim for n, claim in claims.items() if self._is_prefilled(claim) and not _has_jumps(claim)}
        by_engine = {n: claim for n, claim in claims.items() if n not in by_prefill}
        proven = self._prefilled(by_prefill) | self._renewed(by_engine)
        for number, claim in claims.items():
            if self._is_drawn_without_grammar(claim, proven[number]):
                proven[number] = unproven("its last token was drawn without its grammar, as where that takes too long")
        return [proven[number] if verdict is None else verdict for number, verdict in enumerate(found)]

    def _is_drawn_without_grammar(self, claim: Claim, verdict: Verdict) -> bool:
        """Return whether the last token alone differs of an answer that an engine may have ended because its grammar
        took too long: it draws that token without the grammar."""
        if not claim.params.is_constrained or claim.finish["type"] != "abort" or verdict.what != "token":
            return False
        [grammar] = self._engine.parts.grammars.compiled([claim.params])
        return verdict.position == len(claim.token_ids) - 1 and grammar is not None and grammar.nests

    def _is_prefilled(self, claim: Claim) -> bool:
        """Return whether draws of this claim are proven by prefills, and not by the engine's own steps."""
        return self._has_prover and claim.images is None

    # -- without the model ----------------------------------------------------------------------------------------

    def _checked(self, receipt: Receipt) -> Claim | Verdict:
        """Return what a receipt claims, or what is wrong with it already."""
        try:
            if not seal_is_whole(receipt):
                return Verdict("differs", "its hash is not that of its content: it was changed after it was made")
            claim = claim_of(receipt, self._engine.model.vocab_size)
        except (ValueError, TypeError, RecursionError) as error:
            return unproven(f"the receipt {error}")
        if why := self._other_guarantee(receipt.get("guarantee")):
            return unproven(why)
        if (position := claim.wrong_end) is not None:
            return Verdict("differs", "end", position)
        if why := claim.unproven_end or self._other_context(claim) or self._other_ends(claim):
            return unproven(why)
        if why := self._images.absent(claim) or self._beyond_context(claim):
            return unproven(why)
        return self._without_weights(claim) or self._without_grammar(claim) or self._without_settings(claim) or claim

    def _other_guarantee(self, claimed: object) -> str:
        if not isinstance(claimed, Mapping):
            return "the receipt has no guarantee"
        if not claimed.get("invariant"):
            return "it was made without invariant mode: its bits depend on what ran beside it"
        key = repr(sorted(claimed.items(), key=repr))
        if key not in self._known:
            lines = differences(claimed, self._here)
            self.versions |= dict.fromkeys(line for line in lines if line.startswith("versions."))
            self._known[key] = [line for line in lines if not line.startswith("versions.")]
            self.differing |= dict.fromkeys(self._known[key])
        if self._known[key] and not self._anyway:
            return f"the guarantee is another one here: {'; '.join(self._known[key])}"
        return ""

    def _other_context(self, claim: Claim) -> str:
        """Return why the context that ended an output cannot be told from a cut; "": it can, or did not end it."""
        here = self._engine.parts.max_model_len
        if not claim.ends_with_context or claim.max_model_len == here:
            return ""
        return (
            f"the context of its engine, {claim.max_model_len} tokens (max_model_len), has ended it, and here it is "
            f"{here}: give the engine that replays it the same"
        )

    def _other_ends(self, claim: Claim) -> str:
        """Return why the tokens of a claim would end elsewhere here, or be drawn among others; "": they would not.

        Other end-of-sequence tokens than the receipt names are no matter where the output has none of them and they
        stay no draw's choice: an engine without a tokenizer knows fewer. Before min_new_tokens none of them is drawn,
        and a grammar decides about them.
        """
        params, here = claim.params, self._engine.parts.eos_token_ids
        others = here.symmetric_difference(claim.eos)
        of_model = sorted(id for id in others if id < self._engine.model.vocab_size)
        ends = f"end-of-sequence tokens {_first_of_ids(claim.eos)}, and here they are {_first_of_ids(here)}"
        if params.is_constrained and of_model:
            return f"its grammar was followed with {ends}"
        if params.min_new_tokens > 0 and set(of_model).difference(params.stop_token_ids):
            return f"none is drawn before min_new_tokens of the {ends}"
        others = frozenset() if params.ignore_eos else others.difference(params.stop_token_ids)
        if not (found := sorted(others.intersection(claim.token_ids.tolist()))):
            return ""
        return f"its output has tokens {found}, which end a sequence there or here alone: {sorted(here)} do here"

    def _beyond_context(self, claim: Claim) -> str:
        """Return why prefills cannot have the tokens of a claim; "": they can. The engine's own steps end by
        themselves where their context does."""
        num, most = claim.num_prompt_tokens + len(claim.token_ids), self._engine.model.max_model_len
        if not claim.spans or num <= most or not self._is_prefilled(claim):
            return ""
        return f"its {num} tokens are more than the {most} that this model takes"

    def _without_weights(self, claim: Claim) -> Verdict | None:
        """Return a verdict on a sample whose weights are not at hand, or had another version."""
        for span in claim.spans:
            for digest, version in (*((kept.digest, "") for kept in span.kept), (span.digest, span.version)):
                if not digest:
                    return unproven("the receipt has no digest of its weights: none was computed when it was made")
                if not self._source.has(digest):
                    name = f"{digest} (version {version})" if version else digest
                    return unproven(f"no weights of digest {name} are at hand{self._source.hint(digest)}")
            known = self._source.versions(str(span.digest))
            if known and span.version not in (UNNAMED_VERSION, *known):
                were = " and ".join(sorted(known))
                return Verdict("differs", f"version: claimed {span.version!r}, but weights of its digest were {were}")
        return None

    def _without_grammar(self, claim: Claim) -> Verdict | None:
        """Return a verdict on a sample of a grammar that would be followed otherwise here."""
        if not claim.params.is_constrained:
            return None
        if claim.grammar is None or claim.grammar.get("mode") not in ("text", "exact", "off"):
            return unproven("the receipt does not say how its grammar was followed")
        if self._engine.tokenizer is None:
            return unproven("its grammar needs the model's tokenizer")
        config, given = self._engine.config, claim.grammar
        other = [name for name in GRAMMAR_SETTINGS if given.get(name) != getattr(config, name)]
        if other and (claim.grammar["mode"] != "off" or "grammar_any_whitespace" in other):
            return unproven(f"its grammar was followed with other settings: {', '.join(other)}")
        return None

    def _without_settings(self, claim: Claim) -> Verdict | None:
        """Return a verdict on a sample whose settings no request to this model could have."""
        if self._is_prefilled(claim) and not needs_own(claim):
            return None  # tokens, log-probabilities and numbers were checked as they were read
        try:
            self._engine.requests.check(self._images.prompt(claim), _params(claim, self._engine), RequestOptions())
        except ValueError as error:
            return unproven(f"its settings are none for this model: {error}")
        return None

    # -- with it --------------------------------------------------------------------------------------------------

    def _prefilled(self, claims: Mapping[int, Claim]) -> dict[int, Verdict]:
        """Prove samples by prefills, each span with its weights."""
        if not claims:
            return {}
        tasks = [Task(number, claim, span) for number, claim in claims.items() for span in claim.draws]
        prover = Prover(self._engine.parts, self._engine.driver)
        found = prover.prove(tasks, self._source.switch, _whole_samples(tasks, self._on_progress))
        by_claim: dict[int, list[Verdict]] = {number: [] for number in claims}
        for task, verdict in zip(tasks, found, strict=True):
            by_claim[task.number].append(verdict)
        return {number: _first_of(verdicts) for number, verdicts in by_claim.items()}

    def _renewed(self, claims: Mapping[int, Claim]) -> dict[int, Verdict]:
        """Prove samples by the engine's own steps, with their tokens as drafts."""
        found: dict[int, Verdict] = {}
        by_digest: dict[str, list[int]] = {}
        for number, claim in claims.items():
            if len({span.digest for span in claim.spans}) > 1 or any(span.kept for span in claim.spans):
                found[number] = unproven(
                    "it was drawn from several weights, and draws that jumps replace, recurrent layers, prompts with "
                    "images, or a model that ranks share are proven for one"
                )
            elif claim.spans:
                by_digest.setdefault(str(claim.spans[0].digest), []).append(number)
            else:
                found[number] = Verdict("equal")
        self._on_progress(len(found))
        for digest, numbers in by_digest.items():
            try:
                self._source.switch(digest)
            except NoWeights as error:
                found |= dict.fromkeys(numbers, unproven(str(error)))
                self._on_progress(len(numbers))
                continue
            answers = self._engine.renew([self._answer(claims[number]) for number in numbers])
            cut: dict[int, int] = {}
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = compared(claims[number], answer)
                if found[number].status == "differs" and (first := first_replaced(claims[number], answer)) is not None:
                    cut[number] = first
            by_prefill = {number: first for number, first in cut.items() if self._is_prefilled(claims[number])}
            found |= self._drawn_from(by_prefill, claims)
            found |= self._ended_at_the_abort({number: claims[number] for number in cut.keys() - by_prefill.keys()})
            self._on_progress(len(numbers))
        return found

    def _drawn_from(self, firsts: Mapping[int, int], claims: Mapping[int, Claim]) -> dict[int, Verdict]:
        """Prove the last draws of aborted answers, behind all their jumps, by prefills. firsts: where they begin."""
        tasks = []
        for number, first in firsts.items():
            claim = claims[number]
            [span] = claim.draws
            tasks.append(Task(number, claim, replace(span, start=first)))
        if not tasks:
            return {}
        proven = Prover(self._engine.parts, self._engine.driver).prove(tasks, self._source.switch, lambda num: None)
        return {
            task.number: replace(verdict, num_tokens=task.span.start + verdict.num_tokens)
            for task, verdict in zip(tasks, proven, strict=True)
        }

    def _ended_at_the_abort(self, claims: Mapping[int, Claim]) -> dict[int, Verdict]:
        """Prove aborted answers whose last draws the next jump would have replaced, by requests of their length."""
        if not claims:
            return {}
        given = [self._answer(claim) for claim in claims.values()]
        for number, claim in enumerate(claims.values()):
            drawn = given[number].drawn_with
            assert drawn is not None
            params = _up_to(drawn.params, len(claim.token_ids))
            given[number] = replace(given[number], drawn_with=replace(drawn, params=params))
        found: dict[int, Verdict] = {}
        for (number, claim), answer in zip(claims.items(), self._engine.renew(given), strict=True):
            verdict = compared(claim, answer)
            if verdict.status == "differs" and verdict.what != "logprob":  # its jumps depend on the length too
                verdict = unproven(
                    "the abort came before a jump that replaces its last draws, which did not come again"
                )
            found[number] = verdict
        return found

    def _answer(self, claim: Claim) -> Completion:
        """Return a claim as an answer that can be renewed. It is drawn no further than it needs, but that jumps of the
        mode text depend on the length."""
        params = _params(claim, self._engine)
        if not _has_jumps(claim):
            params = _up_to(params, len(claim.token_ids) + claim.ends_with_grammar)
        drawn = DrawnWith(params, RequestOptions(return_receipt=True), claim.seed, self._images.of(claim))
        span, token_ids = claim.spans[-1], tuple(claim.token_ids.tolist())
        return Completion(
            claim.id, claim.index, claim.prompt_ids, token_ids, "", (), None, 0, 0, span.version, span.digest, (),
            drawn_with=drawn,
        )  # fmt: skip


def _up_to(params: SamplingParams, most: int) -> SamplingParams:
    """Return settings that draw the same tokens, but not more than these."""
    most = min(params.max_new_tokens, most)
    return replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most))


def _first_of_ids(ids: Collection[int], most: int = 8) -> str:
    """Return token ids as text, in their order; of many the first ones."""
    text = ", ".join(map(str, sorted(ids)[:most]))
    return f"[{text}]" if len(ids) <= most else f"[{text}, ... ({len(ids)})]"


def _has_jumps(claim: Claim) -> bool:
    return bool(claim.grammar and claim.grammar["mode"] == "text")


def _whole_samples(tasks: Sequence[Task], on_progress: OnProgress) -> OnProgress:
    """Return a function that counts spans, and reports as many samples as that is of them."""
    num_done = num_told = 0
    num_claims = len({task.number for task in tasks})

    def count(num: int) -> None:
        nonlocal num_done, num_told
        num_done += num
        whole = num_done * num_claims // len(tasks)
        on_progress(whole - num_told)
        num_told = whole

    return count


def _first_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a sample from those of its spans, in order."""
    num_tokens = 0
    for verdict in verdicts:
        num_tokens += verdict.num_tokens
        if verdict.status != "equal":
            return replace(verdict, num_tokens=num_tokens)
    return Verdict("equal", num_tokens=num_tokens)


def _params(claim: Claim, engine: Engine) -> SamplingParams:
    """Return the settings with which an engine draws a claim again."""
    params = claim.params
    if claim.grammar is not None:
        params = replace(params, jump_forward=claim.grammar["mode"])
    if engine.tokenizer is None:
        params = replace(params, stop=(), stop_regex=())
    return params
