"""The metrics of `/metrics`: the counts of the swap log, and the memory in the daemon's status.

Pure. Names follow Prometheus: they have units, bytes and seconds; counters end in `_total`.
`deploy/grafana` and `deploy/prometheus` use these names.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from swapd import __version__
from swapd.log import picture
from swapd.log.counts import OTHERS, Counts, Histogram, Tally
from swapd.log.picture import Picture
from swapd.shared.protocol import StatusReply


class Told(NamedTuple):
    """The daemon's last status, and its age in seconds."""

    status: StatusReply
    age_s: float


def render(now: Picture, told: Told, time: float, accept: str) -> tuple[bytes, str]:
    """The text and its content type, in a form that `accept` allows. `time`: Unix time."""
    encode, kind = choose_encoder(accept)
    return encode(_Families(_families(now, told, time))), kind


class _Families(list[Metric]):
    """A registry for the encoder, which collects from it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(families)

    def collect(self) -> Iterable[Metric]:
        return self


def _families(now: Picture, told: Told, time: float) -> Iterator[Metric]:
    yield _info(told.status)
    yield from _memory(told)
    yield from _of_components(now)
    yield from _times(now.counts)
    yield from _queue(now, time)
    yield _counter("swapd_records", "Records of the swap log that were read", now.counts.records)
    missed = "Records of the swap log that were missed: counts are too low by them"
    yield _counter("swapd_records_missed", missed, now.counts.missed)


def _info(status: StatusReply) -> Metric:
    about = InfoMetricFamily("swapd_build", "The daemon, and the device that it serves")
    about.add_metric(
        [], {"version": __version__, "device": status.device, "isolation": status.isolation}
    )
    return about


def _memory(told: Told) -> Iterator[Metric]:
    status = told.status
    resident = status.used_bytes - status.quarantined_bytes
    free = status.budget_bytes - status.used_bytes
    for name, about, value in (
        ("swapd_arena_bytes", "Device memory that the daemon owns", status.budget_bytes),
        ("swapd_resident_bytes", "Arena that components and workspaces have", resident),
        ("swapd_free_bytes", "Arena that nothing uses", free),
        (
            "swapd_quarantined_bytes",
            "Arena to which a process that left may still write",
            status.quarantined_bytes,
        ),
        ("swapd_peak_resident_bytes", "Most of the arena that was in use", status.peak_bytes),
        ("swapd_host_copy_bytes", "Host memory of host copies", status.host_copy_bytes),
        (
            "swapd_pinned_bytes",
            "Host copies that are pinned: the device copies them by itself",
            status.pinned_bytes,
        ),
        (
            "swapd_unpinned_bytes",
            "Host copies whose pinning failed: their copies are slower",
            status.unpinned_bytes,
        ),
        ("swapd_device_bytes", "Memory of the device", status.device_bytes),
        (
            "swapd_device_free_bytes",
            "Memory of the device that no process has",
            status.device_free_bytes,
        ),
        ("swapd_uptime_seconds", "Since the daemon started", status.uptime_s + told.age_s),
        ("swapd_status_age_seconds", "Since the daemon's last status", told.age_s),
    ):
        yield GaugeMetricFamily(name, about, value)


def _of_components(now: Picture) -> Iterator[Metric]:
    inside: dict[str, int] = dict.fromkeys(now.counts.of, 0)
    sizes = dict(inside)
    for item in now.items.values():
        label = item.label if item.label in inside else OTHERS
        sizes[label] += item.nbytes
        inside[label] += item.nbytes if item.inside else 0
    yield _gauge("swapd_component_bytes", "Size of the component", sizes)
    yield _gauge("swapd_component_resident_bytes", "How much of it is on the device", inside)
    for name, about, count in _COUNTERS:
        family = CounterMetricFamily(name, about, labels=("component",))
        for label, tally in now.counts.of.items():
            family.add_metric((label,), count(tally))
        yield family
    about = "Requests refused that named the component, by reason"
    refusals = CounterMetricFamily("swapd_refusals", about, labels=("component", "code"))
    for label, tally in now.counts.of.items():
        for code, number in tally.refusals.items():
            refusals.add_metric((label, code), number)
    yield refusals


_COUNTERS: tuple[tuple[str, str, Callable[[Tally], int]], ...] = (
    ("swapd_loads", "Copies of the component to the device", lambda tally: tally.loads),
    ("swapd_evictions", "Times it left the device", lambda tally: tally.evictions),
    ("swapd_hits", "Uses that found it on the device", lambda tally: tally.hits),
    ("swapd_skips", "Optional acquires that did not get it", lambda tally: tally.skips),
)


def _times(counts: Counts) -> Iterator[Metric]:
    moved = CounterMetricFamily("swapd_moved_bytes", "Bytes copied", labels=("direction",))
    moved.add_metric(("in",), counts.bytes_in)
    moved.add_metric(("out",), counts.bytes_out)
    yield moved
    yield _histogram("swapd_wait_seconds", "From an acquire to its grant", {(): counts.wait}, ())
    yield _histogram(
        "swapd_copy_seconds",
        "From the order of a copy to its end",
        {("in",): counts.copy_in, ("out",): counts.copy_out},
        ("direction",),
    )
    yield _histogram("swapd_hold_seconds", "From a grant to the release", {(): counts.hold}, ())


def _queue(now: Picture, time: float) -> Iterator[Metric]:
    waits = now.waits.values()
    yield GaugeMetricFamily("swapd_queue_length", "Acquires without an answer", len(waits))
    longest = "How long the longest waiting acquire has waited"
    value = picture.waiting(waits, time)
    yield GaugeMetricFamily("swapd_longest_wait_seconds", longest, max(value, 0.0))


def _counter(name: str, about: str, value: int) -> Metric:
    return CounterMetricFamily(name, about, value)


def _gauge(name: str, about: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=("component",))
    for label, value in values.items():
        family.add_metric((label,), value)
    return family


def _histogram(
    name: str,
    about: str,
    of: dict[tuple[str, ...], Histogram],
    labels: tuple[str, ...],
) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, histogram in of.items():
        total, buckets = 0, []
        bounds = [*map(str, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(values, buckets, histogram.sum)
    return family
