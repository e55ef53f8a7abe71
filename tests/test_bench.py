"""`swapd bench` prints what it promises. Its times are for people; its counts hold anywhere."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)  # over a minute alone, and another test runs beside it
def test_bench_prints_every_figure_with_both_sides() -> None:
    command = [sys.executable, "-m", "swapd", "bench", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report.keys() == {
        "swap_in_ratio",
        "bytes_back",
        "hit_rtt_ratio",
        "decode_share",
        "hooks_share",
        "handle_us",
        "handle_busy_us",
        "fd_growth",
        "rss_growth_bytes",
        "stream_ratio",
        "stream_peak_blocks",
        "load_speed_ratio",
        "load_memory_ratio",
        "raw",
        "device",
    }
    assert report["raw"]["swap_in"].keys() >= {"swap_s", "copy_s"}
    assert report["raw"]["hit"].keys() >= {"hit_s", "two_round_trips_s"}
    assert report["raw"]["hooked"].keys() >= {"bare_s", "whole_s", "streamed_s"}
    assert report["bytes_back"] == 0
    assert report["fd_growth"] == 0
    assert report["rss_growth_bytes"] < 2 << 20
    assert report["load_memory_ratio"] < 1.15
    assert report["raw"]["load"].keys() >= {"load_s", "read_s"}
    assert report["raw"]["leaks"]["swaps"] == 2000
    assert report["raw"]["leaks"]["idle_wakeups_per_s"] < 1
    streaming = report["raw"]["stream"]
    assert streaming.keys() >= {"stream_s", "alone_s"}
    assert report["stream_peak_blocks"] <= 3
    assert streaming["kept"] == {"4": "..k...k...k...k.", "8": ".k.k.k.k.k.k.k.k"}
    for kept, copied in streaming["copied"].items():
        assert abs(copied - (16 - int(kept))) <= 2, "but for those on their way as it was counted"
