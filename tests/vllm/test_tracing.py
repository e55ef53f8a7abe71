"""A request of a real engine is traced: the swap that it waited for is in its trace."""

from tests.guarantees.harness import MIB
from tests.vllm.engines import REQUESTS, TOKENS, Scene, on_swapd

TRACE, OTHER = "a" * 32, "b" * 32
SPAN = "1" * 16
#: The scheduler takes the lease, and is in the worker's process, as vllm-omni has it.
MORE = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 4 * MIB}


def test_the_swap_that_made_a_request_slow_is_in_its_trace(scene: Scene) -> None:
    daemon = scene.daemon()
    engine = scene.process("thinker")
    engine.run("tests.vllm.spans:provide")
    engine.start(**on_swapd(scene.models / "thinker", daemon.folder, {"kv": "auto"}, **MORE))
    (other,) = scene.on_swapd(daemon, "talker")
    other.generate(REQUESTS[0], TOKENS)
    began = len(engine.run("tests.vllm.spans:made"))
    engine.ask(REQUESTS[1], TOKENS, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
    engine.ask(REQUESTS[2][:1], TOKENS, {"traceparent": f"00-{OTHER}-{SPAN}-01"})
    engine.finish()
    engine.shut_down()  # closes the client, which ends its open spans
    made = engine.run("tests.vllm.spans:made")[began:]
    (acquire, *_) = [span for span in made if span["name"] == "swapd.acquire"]
    assert (acquire["trace"], acquire["parent"]) == (TRACE, SPAN)
    assert OTHER in acquire["links"]
    assert "thinker" in acquire["components"]
    moves = {span["name"] for span in made if span["trace"] == TRACE} - {"swapd.acquire"}
    assert moves == {"swapd.load", "swapd.evict"}
    other.shut_down()
