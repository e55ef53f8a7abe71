"""`swapd run FILE.toml` with a real server as a stage: it is ready when its weights are swapd's."""

import json
import os
import signal
import sys
from pathlib import Path

from tests.vllm import servers


def test_a_server_is_a_stage_and_others_start_when_it_has_registered(
    models: Path, tmp_path: Path
) -> None:
    servers.write(tmp_path, models)
    serve = servers.command(tmp_path, tmp_path / "s")
    (file := tmp_path / "run.toml").write_text(
        f"""
        [daemon]
        device = "host"
        [stages.thinker]
        command = {json.dumps(serve)}
        ready = "registered"
        [stages.after]
        command = {json.dumps([sys.executable, "-m", "swapd", "status", "--json"])}
        after = ["thinker"]
        """
    )
    with servers.under_swapd(tmp_path, tmp_path / "s", file) as server:
        assert len(server.ready().complete([1, 2, 3], 4)) == 4
        os.kill(server.pid, signal.SIGTERM)
        assert server.exit_status() in (0, 143)
        assert '"label": "thinker/' in server.log
        assert "), 1 GiB\n" in server.log, "as much as the other stage may want"
        assert "swapd: after ended with status 0" in server.log
        (told,) = [x for x in server.log.splitlines() if x.startswith("swapd: thinker: ")]
        assert not told.startswith("swapd: thinker: 0 swaps"), told
