"""A request through the stages of the real model. Stdlib only."""

import random

#: In the order of a request.
STAGES = ("thinker", "talker", "token2wav")

#: Tokens of a request's text.
PROMPT = 32


def prompt(number: int) -> list[int]:
    """The text of a request."""
    return random.Random(number).choices(range(1000), k=PROMPT)
