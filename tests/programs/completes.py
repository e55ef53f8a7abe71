"""The load on a measured server: one completion, through its unix socket."""

import http.client
import json
import socket
import sys


def main(path: str, model: str) -> None:
    asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    connection = http.client.HTTPConnection("server")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    answer = connection.getresponse()
    said = answer.read().decode()
    if answer.status != http.client.OK:
        sys.exit(f"{answer.status}: {said}")
    print("completed", json.loads(said)["usage"]["completion_tokens"], flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
