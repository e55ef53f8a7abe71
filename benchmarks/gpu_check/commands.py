"""Commands of a worker process: one JSON command a line on stdin.

`{"do", "arguments", "options"}`; for each one answer on stdout, `{"ok"}` or `{"error"}`. Commands
run in order, in the main thread. Each command is a method. Stdlib only.
"""

import json
import os
import sys
from typing import Any, TextIO


class Commands:
    """Its methods are commands."""

    #: Stream of the answers.
    _out: TextIO = sys.stdout

    def say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def serve(self) -> None:
        """Execute commands until stdin ends. Printed text goes to stderr."""
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                method = getattr(self, command["do"])
                self.say({"ok": method(*command["arguments"], **command["options"])})
            except Exception as exc:  # noqa: BLE001 - the section judges
                self.say({"error": f"{type(exc).__name__}: {exc}"})
