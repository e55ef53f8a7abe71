"""Each error and warning of the client names its subject, and a remedy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import swapd_client
from swapd.shared.protocol import Acquire, AcquireWorkspace, Status
from swapd_client.leases.leases import _listed
from swapd_client.session.channel import _named

CLIENT = Path(swapd_client.__file__).parent

#: Messages without a name, since they have one possible subject, or no user sees them.
OF_ONE_THING = {
    "budget= is for a daemon that connect starts: add start=True",
    "faults are not explained: there is no handler for this machine",
    "cpu_offload_components is empty; leave it out to offload all components found",
    "this client is closed; connect again",
    "there is no such work",  # a bug
    "there is no such memory",  # a bug
    "scratch has no values to update; write to it under a lease",  # it is mutable: refused before
    "this process was forked from one that uses swapd: sessions and weights stay with the parent. "
    "Connect in the child, or start it with spawn",
    "a second welcome",  # ends the session, which says it in its own words
    "sys.executable is empty, so swapd cannot be started; run `swapd serve` yourself",
    "this version of vLLM does not make its KV cache as one buffer: set kv: private",
    # from `_parsed`, with the option and its value
    "give seconds, 0 or more",
    "give seconds, more than 0",
    "give a number of chunks, 0 or more",
    "another process is at its address",  # by `ranks`, with the rank
}


def bare_messages() -> Iterator[str]:
    """The texts that name nothing, among all errors and logged warnings."""
    for path in CLIENT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        raised = [
            node.exc
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)  # else the text is longer, from another place
        ]
        logged = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"warning", "error", "critical", "exception", "warn"}
        ]
        for call in (*raised, *logged):
            if len(call.args) == 1:
                (text,) = call.args
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def test_each_message_names_what_it_is_about() -> None:
    assert set(bare_messages()) == OF_ONE_THING


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a",), "acquire of 'a'"),
        (("a", "b", "c", "d", "e"), "acquire of 'a', 'b', 'c', 2 more"),
        ((), "acquire"),
    ],
)
def test_a_request_is_called_by_its_components(names: tuple[str, ...], said: str) -> None:
    assert _named(Acquire(1, names)) == said


def test_a_request_without_components_is_called_by_its_kind() -> None:
    assert _named(Status(1)) == "status"
    assert _named(AcquireWorkspace(1, 5)) == "acquire workspace"


def test_a_few_components_are_listed() -> None:
    assert _listed(()) == "nothing"
    assert _listed("ba") == "'a', 'b'"
    assert _listed("edcba") == "'a', 'b', 'c', 2 more"
