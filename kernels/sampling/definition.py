"""The number of the definition of a draw. Under another number, equal seeds mean other tokens.

1: inverse transform of one number per (seed, position). It had no number of its own.
2: the Gumbel maximum, with the noise of noise.py and the filters of reference.py.
"""

DRAW_DEFINITION = 2
GREEDY_BELOW = 1e-6  # temperatures under this mean the largest logit, and log-probabilities at temperature 1
