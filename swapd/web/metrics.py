"""The metrics of `/metrics`, from a daemon's status. Pure.

Names follow Prometheus: with units, bytes and seconds; counters end in `_total`. `deploy/grafana`
and `deploy/prometheus` use these names.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from swapd.cli.conclusions import Kind, conclusions
from swapd.shared.protocol import Counts, Histogram, Status


class _Families(list[Metric]):
    def collect(self) -> Iterable[Metric]:
        return self


def render(status: Status, age_s: float, accept: str) -> tuple[bytes, str]:
    try:
        encode, kind = choose_encoder(accept)
    except (TypeError, ValueError):  # it raises at a version that is no number
        encode, kind = choose_encoder("")
    return encode(_Families(_families(status, age_s))), kind


def _families(status: Status, age_s: float) -> Iterator[Metric]:
    about = InfoMetricFamily("swapd_build", "The daemon, and the device that it serves")
    about.add_metric(
        [],
        {"version": status.version, "device": status.device, "isolation": status.isolation},
    )
    yield about
    for name, text, value in _gauges(status, age_s):
        yield GaugeMetricFamily(name, text, value)
    found = {each.kind for each in conclusions(status)}
    kinds = {kind: int(kind in found) for kind in get_args(Kind)}
    yield _gauge("swapd_conclusion", "1 while swapd status draws this conclusion", kinds, "kind")
    assert status.counts is not None
    yield from _of_components(status, status.counts)
    yield from _times(status, status.counts)
    records = "Records of the swap log that were written"
    yield CounterMetricFamily("swapd_records", records, status.records)
    missed = "Records of the swap log that its file lacks: the disk did not take them"
    yield CounterMetricFamily("swapd_records_missed", missed, status.records_lost)


def _gauges(status: Status, age_s: float) -> Iterator[tuple[str, str, float]]:
    resident = status.used_bytes - status.quarantined_bytes
    free = status.budget_bytes - status.used_bytes
    yield "swapd_arena_bytes", "Device memory that the daemon owns", status.budget_bytes
    yield "swapd_resident_bytes", "Arena that components and workspaces have", resident
    yield "swapd_free_bytes", "Arena that nothing uses", free
    about = "Arena to which a process that left may still write"
    yield "swapd_quarantined_bytes", about, status.quarantined_bytes
    yield "swapd_peak_resident_bytes", "Most of the arena that was in use", status.peak_bytes
    yield "swapd_host_copy_bytes", "Host memory of host copies", status.host_copy_bytes
    about = "Host copies that no component uses, kept for the next session"
    yield "swapd_kept_bytes", about, sum(each.nbytes for each in status.kept)
    about = "Host copies that are pinned: the device copies them by itself"
    yield "swapd_pinned_bytes", about, status.pinned_bytes
    about = "Host copies whose pinning failed: their copies are slower"
    yield "swapd_unpinned_bytes", about, status.unpinned_bytes
    yield "swapd_device_bytes", "Memory of the device", status.device_bytes
    about = "Memory of the device that no process has"
    yield "swapd_device_free_bytes", about, status.device_free_bytes
    yield "swapd_uptime_seconds", "Since the daemon started", status.uptime_s + age_s
    yield "swapd_status_age_seconds", "Since the daemon's last status", age_s
    yield "swapd_queue_length", "Acquires without an answer", status.waiting
    longest = max((wait.waited_s + age_s for wait in status.waits), default=0.0)
    about = "How long the longest waiting acquire has waited"
    yield "swapd_longest_wait_seconds", about, longest


def _of_components(status: Status, counts: Counts) -> Iterator[Metric]:
    inside: dict[str, int] = dict.fromkeys(counts.of, 0)
    sizes = dict(inside)
    for c in status.components:
        label = c.part_of or c.name
        label = label if label in sizes else ""
        sizes[label] += c.nbytes
        inside[label] += c.nbytes if c.inside else 0
    yield _gauge("swapd_component_bytes", "Size of the component", sizes)
    yield _gauge("swapd_component_resident_bytes", "How much of it is on the device", inside)
    for name, (field, about) in _COUNTED.items():
        values = {label: getattr(tally, field) for label, tally in counts.of.items()}
        yield _counter(name, about, values)
    about = "Requests refused that named the component, by reason"
    refusals = CounterMetricFamily("swapd_refusals", about, labels=("component", "code"))
    for label, tally in counts.of.items():
        for code, number in tally.refusals.items():
            refusals.add_metric((label, code), number)
    yield refusals


#: Counters of each component, with their fields.
_COUNTED = {
    "swapd_loads": ("loads", "Copies of the component to the device"),
    "swapd_wasted_loads": ("wasted", "Loads soon after it had left for others"),
    "swapd_evictions": ("evictions", "Times it left the device"),
    "swapd_hits": ("hits", "Uses that found it on the device"),
    "swapd_skips": ("skips", "Optional acquires that did not get it"),
}


def _times(status: Status, counts: Counts) -> Iterator[Metric]:
    moved = {"in": status.bytes_in, "out": status.bytes_out}
    yield _counter("swapd_moved_bytes", "Bytes copied", moved, "direction")
    yield _histogram("swapd_wait_seconds", "From an acquire to its grant", {"": counts.wait_s})
    copies = {"in": counts.copy_in_s, "out": counts.copy_out_s}
    about = "From the order of a copy to its end"
    yield _histogram("swapd_copy_seconds", about, copies, "direction")
    yield _histogram("swapd_hold_seconds", "From a grant to the release", {"": counts.hold_s})


def _gauge(name: str, about: str, values: dict[str, int], label: str = "component") -> Metric:
    family = GaugeMetricFamily(name, about, labels=(label,))
    for each, value in values.items():
        family.add_metric((each,), value)
    return family


def _counter(name: str, about: str, values: dict[str, int], label: str = "component") -> Metric:
    family = CounterMetricFamily(name, about, labels=(label,))
    for each, value in values.items():
        family.add_metric((each,), value)
    return family


def _histogram(name: str, about: str, of: dict[str, Histogram], label: str = "") -> Metric:
    family = HistogramMetricFamily(name, about, labels=(label,) if label else ())
    for value, histogram in of.items():
        total, buckets = 0, []
        bounds = [*map(str, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric((value,) if label else (), buckets, histogram.sum)
    return family
