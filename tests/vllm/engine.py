"""An engine in a process of its own: `python -m tests.vllm.engine`, driven through pipes.

$TESTS_VLLM_DRIVES may name another class to be driven than `Engine` (`diffusion.py`).

A line on stdin is a command in JSON, and is answered by a line on what was stdout; everything
that vLLM prints goes to stderr. Ends when stdin does.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, TextIO

#: Of a command's answer when it raised: the whole of what was said, no more than that.
MESSAGE_MAX = 20_000

PRELOADED = (
    "compressed_tensors",  # which vLLM imports as it loads a model
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
)
#: Where vllm-omni is installed, after those.
PRELOADED_OF_OMNI = (
    "vllm_omni",
    "vllm_omni.diffusion.executor.uniproc_executor",
    "vllm_omni.diffusion.worker.diffusion_worker",
)

#: The environment variable that says what is driven.
DRIVES = "TESTS_VLLM_DRIVES"


def load() -> None:
    """Import what takes long to import."""
    omni = PRELOADED_OF_OMNI if find_spec("vllm_omni") else ()
    for name in (*PRELOADED, *omni):
        import_module(name)


class Program:
    """What can be driven before there is an engine, and without one."""

    def imports(self, name: str) -> None:
        """For what importing that module does, such as registering a model."""
        import_module(name)

    def run(self, function: str, *arguments: Any) -> Any:
        """What `module:function` returns, as JSON can say it."""
        return resolve_name(function)(*arguments)


class Engine(Program):
    """One `vllm.LLM`. What its methods return must be JSON."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"  # noqa: TID251
        self._asked = 0
        #: What each request has got so far, by its number.
        self._tokens: dict[str, list[int]] = {}

    def versions(self) -> dict[str, str]:
        """Of vLLM, and of vLLM-Omni if it is there; torchvision, too, can be imported."""
        import_module("torchvision")
        packages = [name for name in ("vllm", "vllm_omni") if find_spec(name)]
        return {name: import_module(name).__version__ for name in packages}

    def plugins(self) -> list[str]:
        """What vLLM finds to call in every process."""
        return [entry.value for entry in entry_points(group="vllm.general_plugins")]

    def fork_workers(self) -> None:
        """Have processes for ranks, and for the core, forked from this one; vLLM spawns them, to
        import all anew.
        """
        from vllm.v1.engine import utils
        from vllm.v1.executor import multiproc_executor

        for module in (utils, multiproc_executor):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")

    def start(self, **arguments: Any) -> None:
        """Build the engine. Blocks until it is ready to serve."""
        from vllm import LLM

        self._llm = LLM(**arguments)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """New requests, for so many tokens each, of a trace. Nothing is computed yet."""
        from vllm import SamplingParams

        settings = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        for prompt in prompts:
            self._asked += 1
            number = str(self._asked)
            self._tokens[number] = []
            prompt_of = {"prompt_token_ids": list(prompt)}
            self._llm.llm_engine.add_request(number, prompt_of, settings, trace_headers=headers)

    def see(self, prompt: Sequence[int], colour: Sequence[int], tokens: int) -> list[list[int]]:
        """As `generate`, one prompt with a picture of a colour (red, green, blue) in it."""
        from PIL import Image
        from vllm import SamplingParams

        settings = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        picture = Image.new("RGB", (112, 112), tuple(colour))
        prompt_of = {"prompt_token_ids": list(prompt), "multi_modal_data": {"image": picture}}
        (done,) = self._llm.generate([prompt_of], settings, use_tqdm=False)
        return [list(done.outputs[0].token_ids)]

    def step(self, times: int) -> list[list[int]]:
        """So many steps; returns what the open requests have got so far, in order."""
        for _ in range(times):
            for output in self._llm.llm_engine.step():
                self._tokens[output.request_id] = list(output.outputs[0].token_ids)
        return list(self._tokens.values())

    def finish(self) -> list[list[int]]:
        """Step until no request is open; returns what they all got, in order."""
        while self._llm.llm_engine.has_unfinished_requests():
            self.step(1)
        done = list(self._tokens.values())
        self._tokens.clear()
        return done

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        self.ask(prompts, tokens)
        return self.finish()

    def serve(self, many: Sequence[Sequence[Sequence[int]]], tokens: int) -> list[Any]:
        """Requests one after the other: for each what it got, and when (Unix time, seconds) its
        first step had ended and its last one began: between them it needs its weights for certain.
        """
        done = []
        for prompts in many:
            self.ask(prompts, tokens)
            self.step(1)
            running = last = time.time()  # noqa: TID251 - as in the swap log
            while self._llm.llm_engine.has_unfinished_requests():
                last = time.time()  # noqa: TID251
                self.step(1)
            done.append([self.finish(), running, last])
        return done

    def rest(self) -> None:
        """A step of nothing, by which a server's engine says that its requests have ended. A core
        in a process of its own takes it unasked."""
        if not self._apart:
            self.step(1)

    def forget_prefixes(self) -> bool:
        """Have the next requests find no prefixes in the cache, as those of a new engine."""
        return bool(self._llm.reset_prefix_cache())

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker's method returns."""
        return list(self._llm.collective_rpc(method, args=arguments))

    def sleep(self) -> None:
        """Free what the engine has on the device; its weights wait on the host."""
        self._llm.sleep(level=1)

    def wake_up(self) -> None:
        self._llm.wake_up()

    def cpu_s(self) -> float:
        """Seconds this process has computed, all its threads together."""
        return time.process_time()

    def children(self) -> list[int]:
        """The processes it has started, by pid."""
        return [child.pid for child in multiprocessing.active_children() if child.pid]

    def shut_down(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


def serve(commands: TextIO, answers: TextIO) -> None:
    engine = resolve_name(os.environ.get(DRIVES, f"{Engine.__module__}:Engine"))()  # noqa: TID251
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(engine, command["do"])(*command["args"], **command["options"])}
        except Exception as exc:  # noqa: BLE001 - the driver judges
            answer = {"error": type(exc).__name__, "message": str(exc)[:MESSAGE_MAX]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    given, said = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    serve(given, said)
    os._exit(0)  # whoever drove it is gone, and waits for nothing


if __name__ == "__main__":
    main()
