"""A process that takes profile after profile while other threads run torch's operations: torch can crash it.

Arguments: the seconds, whether the engine overlaps, and a folder. Prints the number of profiles.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

from lockstep.integration.http.admin.recorder import Profiler
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.random_models import random_model

NUM_THREADS = 3


def compute(over: threading.Event) -> None:
    """Run operations as a trainer does, or an update of the weights."""
    layer, x = torch.nn.Linear(64, 64), torch.randn(64, 64)
    while not over.is_set():
        layer(x).relu().sum()


def begin_threads(over: threading.Event) -> None:
    """Run operations in threads that begin and end."""
    while not over.is_set():
        thread = threading.Thread(target=lambda: [torch.ones(4) + 1 for _ in range(50)])
        thread.start()
        thread.join()


def main() -> None:
    seconds, overlap, folder = float(sys.argv[1]), sys.argv[2] == "overlap", Path(sys.argv[3])
    torch.set_num_threads(1)
    engine, over, num = Engine(random_model("qwen3"), EngineConfig(kv_cache=64, overlap=overlap)), threading.Event(), 0
    threads = [threading.Thread(target=compute, args=(over,)) for _ in range(NUM_THREADS)]
    threads.append(threading.Thread(target=begin_threads, args=(over,)))
    with engine.model.rollout_phase():
        engine.start()
        profiler, end = Profiler(engine), time.monotonic() + seconds
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            profiler.start(str(folder), ["CPU"], profile_id="storm")
            if num % 50 == 0:  # the begins and ends are what matters
                engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2, ignore_eos=True))
            profiler.stop()
            num += 1
        over.set()
        for thread in threads:
            thread.join()
        engine.stop()
    engine.close()
    print(num)


if __name__ == "__main__":
    main()
