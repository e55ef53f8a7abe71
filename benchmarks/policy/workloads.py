"""Workloads of a few large components, W1 to W7.

A request names one component, which must be in as a whole before it runs. W1: the three stages of
an omni model, one after the other. W2: the same by the sizes of a real one, GiB. W3: half of the
requests want text only. W4: two pipelines of pictures. W5: four stages, often ended after two. W6:
six components in no order, some more often than others. W7: two pipelines, in phases.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

SPEECH = ("thinker", "talker", "code2wav")


class Workload(NamedTuple):
    name: str
    requests: Sequence[str]
    sizes: Mapping[str, int]
    room: int


def workloads(seed: int) -> Iterator[Workload]:
    """All seven; each random one has a generator of its own."""
    ones = dict.fromkeys(SPEECH, 1)
    yield Workload("W1", SPEECH * 300, ones, 2)
    yield Workload("W2", SPEECH * 300, {"thinker": 60, "talker": 8, "code2wav": 2}, 66)
    yield Workload("W3", _mixed(seed, 1500, 0.5, ("thinker",), SPEECH), ones, 2)
    pictures = {"text": 10, "dit": 24, "vae": 1, "text2": 16, "dit2": 28, "vae2": 1}
    first, second = ("text", "dit", "vae"), ("text2", "dit2", "vae2")
    yield Workload("W4", _mixed(seed, 1200, 0.7, first, second), pictures, 48)
    voice = {"enc": 3, "ar": 14, "dit": 10, "voc": 2}
    yield Workload("W5", _mixed(seed, 1500, 0.6, tuple(voice), ("enc", "ar")), voice, 20)
    letters, weights = "abcdef", [1 / rank for rank in range(1, 7)]
    drawn = random.Random(seed).choices(letters, weights, k=1500)
    yield Workload("W6", drawn, dict.fromkeys(letters, 1), 3)
    phases = ("abc" * 40 + "dea" * 40) * 7
    yield Workload("W7", phases[:1560], dict.fromkeys("abcde", 1), 2)


def _mixed(
    seed: int, length: int, share: float, often: Sequence[str], else_: Sequence[str]
) -> list[str]:
    """Whole pipelines, until there are so many requests."""
    chance, requests = random.Random(seed), list[str]()
    while len(requests) < length:
        requests += often if chance.random() < share else else_
    return requests
