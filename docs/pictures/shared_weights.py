"""A picture of the whole: a trainer and an engine in one rank share the weights; HTTP and other engines are outside."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, Drawing

WIDTH, HEIGHT, TOP = 210, 84, 92  # of the boxes in the rank
TRAINER, WEIGHTS, ENGINE = 44, 360, 676  # left edges
OUTSIDE = 232  # upper edge of the boxes outside the rank


def draw() -> Drawing:
    """Draw the rank's trainer, weights and engine in a row, with other engines and HTTP below them."""
    drawing = Drawing(930, 308, "Trainer and engine in one rank share the weights; clients reach the engine over HTTP")
    drawing.rect(24, 20, 882, 176, "none", SOFT, 10, dash="6 4")
    drawing.text(40, 38, "one torchrun rank", 13, SOFT, "start")
    drawing.box(TRAINER, TOP, WIDTH, HEIGHT, ("trainer", "your loop in PyTorch:", "loss, backward, optimizer"), ORANGE)
    drawing.box(WEIGHTS, TOP, WIDTH, HEIGHT, ("weights", "the module that is trained,", "with a version and a digest"),
                GREEN)  # fmt: skip
    drawing.box(ENGINE, TOP, WIDTH, HEIGHT, ("engine", "scheduling, prefix cache,", "grammars, sampling"), BLUE)
    middle, gap = TOP + HEIGHT / 2, (WEIGHTS - TRAINER - WIDTH) / 2
    drawing.arrow([(TRAINER + WIDTH, middle), (WEIGHTS - 2, middle)], INK)
    drawing.text(TRAINER + WIDTH + gap, middle - 12, "steps", 12.5, SOFT)
    drawing.arrow([(ENGINE, middle), (WEIGHTS + WIDTH + 2, middle)], INK)
    drawing.text(WEIGHTS + WIDTH + gap, middle - 12, "runs", 12.5, SOFT)
    above, half = TOP - 20, WIDTH / 2
    back = [(ENGINE + half, TOP), (ENGINE + half, above), (TRAINER + half, above), (TRAINER + half, TOP - 2)]
    drawing.arrow(back, INK)
    drawing.text(WEIGHTS + half, above - 14, "tokens, log-probabilities, version and digest", 12.5, SOFT)
    drawing.box(WEIGHTS, OUTSIDE, WIDTH, 56, ("other engines", "checked copies of the weights"), SOFT)
    drawing.arrow([(WEIGHTS + half, TOP + HEIGHT), (WEIGHTS + half, OUTSIDE - 2)], SOFT, dash="5 4")
    drawing.box(ENGINE, OUTSIDE, WIDTH, 56, ("HTTP", "SGLang's and OpenAI's calls"), PURPLE)
    drawing.arrow([(ENGINE + half, OUTSIDE), (ENGINE + half, TOP + HEIGHT + 2)], INK)
    return drawing
