"""The problems of a dataset of the package reasoning-gym, which makes as many as are asked for."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping

from .problems import Problem


def gym_problems(name: str, options: Mapping[str, object], seed: int) -> list[Problem]:
    """Make the problems of a dataset, whose rows are its entries.

    options: fields of the dataset's config, and `size`, the number of problems; `seed` is the run's where it has none.
    Raises ValueError naming the key for a dataset that is not there, options that it does not take, and a missing
    package.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("data.reasoning_gym needs reasoning-gym, the extra `rewards`: pip install -e '.[rewards]'")
    from reasoning_gym.factory import DATASETS, create_dataset  # slow to import

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        hint = f" (is it {near[0]!r}?)" if near else ""
        raise ValueError(f"data.reasoning_gym: Reasoning Gym has no dataset {name!r}{hint}")
    try:
        dataset = create_dataset(name, **{"seed": seed, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"data.reasoning_gym_options: {' '.join(str(error).split())}") from error
    return [
        Problem(entry["question"], str(entry["answer"]), f"{name}[{index}]", entry)
        for index, entry in enumerate(dataset)
    ]
