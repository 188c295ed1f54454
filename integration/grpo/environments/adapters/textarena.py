"""Games of TextArena, which the model plays alone or against a given opponent.

A row has `seed`, a number, and may have `env`, the name of its game. The model is player 0 of one conversation: what
the game tells it since its last move is a user's message, and its answer is its move.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...user_code import imported
from ..episode import Episode
from ..session import NoRoom, Session
from .packages import package

_MODEL = 0  # the player that is trained


async def play(
    row: Mapping[str, Any], session: Session, *, env: str = "", num_players: int = 1, max_turns: int = 20,
    opponent: str = "",
) -> Episode:  # fmt: skip
    """Play one game, of the kind that the row or `env` names, and reward it by the game's own reward of player 0.

    num_players: of the game; the others' moves are those of `opponent`, a function at "module:function" or
    "file.py:function" of what the player was told, with the move as its result. max_turns: moves of the model, after
    which a game that is not over counts 0. A success is a reward of 1. Raises ValueError for a row without a seed, a
    game that is not there, and players without an opponent.
    """
    name = str(row.get("env", env))
    if not isinstance(seed := row.get("seed"), int):
        raise ValueError(f"the environment textarena needs rows with seed, a number, not {seed!r}")
    if num_players > 1 and not opponent:
        raise ValueError("the environment textarena needs its option opponent for games of several players")
    game = _Game(name, num_players, seed)
    other = _function(opponent) if opponent else None
    is_over, num_moves = False, 0
    while not is_over and num_moves < max_turns:
        player, told = game.told()
        if player != _MODEL:
            assert other is not None
            is_over = game.move(str(other(told)))
            continue
        try:
            answer = await session.turn(told)
        except NoRoom:
            if not session.turns:
                raise
            break
        num_moves += 1
        is_over = game.move(answer.text)
    reward = game.reward() if is_over else 0.0
    return session.episode({"game": reward, "success": float(reward >= 1.0)})


play.is_repeatable = True  # type: ignore[attr-defined]  # a game follows from its seed and the moves


class _Game:
    """One game, whose random numbers are its own: TextArena draws from the module `random`, which all share."""

    def __init__(self, name: str, num_players: int, seed: int) -> None:
        textarena = package("textarena", "textarena")
        self._random = random.Random(seed).getstate()
        with self._own_random():
            try:
                # The raw game tells a player what is new; the others repeat everything from the start.
                self._game = textarena.make(name if name.endswith("-raw") else f"{name}-raw")
                self._game.reset(num_players=num_players, seed=seed)
            except (ValueError, AssertionError) as error:
                raise ValueError(f"the environment textarena, game {name!r}: {error}") from error
        self._own_move = textarena.ObservationType.PLAYER_ACTION

    def told(self) -> tuple[int, str]:
        """Return the player whose turn it is, and what it was told since its last one."""
        with self._own_random():
            player, told = self._game.get_observation()
        lines = [text for by, text, kind in told if not (by == player and kind is self._own_move)]
        return player, "\n".join(lines) or "It is your turn."

    def move(self, text: str) -> bool:
        """Make a move. Returns whether the game is over."""
        with self._own_random():
            return bool(self._game.step(text)[0])

    def reward(self) -> float:
        """Return the model's reward of a game that is over."""
        rewards, _ = self._game.close()
        return float((rewards or {}).get(_MODEL, 0.0))

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)


def _function(location: str) -> Callable[[str], str]:
    found = imported(location, "opponent")
    if not callable(found):
        raise ValueError(f"opponent {location!r}: a {type(found).__name__} cannot be called")
    return found
