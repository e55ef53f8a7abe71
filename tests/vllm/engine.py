"""An engine in a process of its own: `python -m tests.vllm.engine`, driven through pipes.

$TESTS_VLLM_DRIVES may name another class to drive than `Engine` (`diffusion.py`).

Each line on stdin is a command in JSON. The answer is a line on the first stdout; all output of
vLLM goes to stderr. The process ends when stdin does.
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

#: The length of an error in an answer: enough for all of its text.
MESSAGE_MAX = 20_000

PRELOADED = (
    "compressed_tensors",  # vLLM imports it as it loads a model
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
)
#: More modules, if vllm-omni is installed.
PRELOADED_OF_OMNI = (
    "vllm_omni",
    "vllm_omni.diffusion.executor.uniproc_executor",
    "vllm_omni.diffusion.worker.diffusion_worker",
)

#: The environment variable that names the class to drive.
DRIVES = "TESTS_VLLM_DRIVES"


def load() -> None:
    """Import the modules that take long, and have vLLM inspect the class of a model in the process
    that asks: it would start another, which imports all of vLLM again.
    """
    omni = PRELOADED_OF_OMNI if find_spec("vllm_omni") else ()
    for name in (*PRELOADED, *omni):
        import_module(name)
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()


class Program:
    """Commands that need no engine."""

    def imports(self, name: str) -> None:
        """Import that module for its effect, such as registering a model."""
        import_module(name)

    def run(self, function: str, *arguments: Any) -> Any:
        """Call `module:function`; returns its result, which JSON must be able to hold."""
        return resolve_name(function)(*arguments)


class Engine(Program):
    """One `vllm.LLM`. Its methods return values for JSON."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"  # noqa: TID251
        self._asked = 0
        #: The tokens of each request so far, by its number.
        self._tokens: dict[str, list[int]] = {}

    def versions(self) -> dict[str, str]:
        """The versions of vLLM, and of vLLM-Omni if it is there. Imports torchvision, too."""
        import_module("torchvision")
        packages = [name for name in ("vllm", "vllm_omni") if find_spec(name)]
        return {name: import_module(name).__version__ for name in packages}

    def plugins(self) -> list[str]:
        """The plugins that vLLM calls in every process."""
        return [entry.value for entry in entry_points(group="vllm.general_plugins")]

    def fork_workers(self) -> None:
        """Fork the processes of ranks and the core from this one; vLLM would spawn them, and import
        everything again.
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
        """Add requests, for so many tokens each, with a trace. Nothing is computed yet."""
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

    def step(self, times: int) -> list[list[int]]:
        """Make so many steps; returns the tokens of the open requests so far, in order."""
        for _ in range(times):
            for output in self._llm.llm_engine.step():
                self._tokens[output.request_id] = list(output.outputs[0].token_ids)
        return list(self._tokens.values())

    def in_flight(self) -> list[int]:
        """The tokens of each step of a pipeline that vLLM has not read yet."""
        queue = self._llm.llm_engine.engine_core.engine_core.batch_queue
        return [scheduled.total_num_scheduled_tokens for _, scheduled, _ in queue]

    def finish(self) -> list[list[int]]:
        """Step until no request is open; returns the tokens of all, in order."""
        while self._llm.llm_engine.has_unfinished_requests():
            self.step(1)
        done = list(self._tokens.values())
        self._tokens.clear()
        return done

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        self.ask(prompts, tokens)
        return self.finish()

    def serve(self, many: Sequence[Sequence[Sequence[int]]], tokens: int) -> list[Any]:
        """Serve requests one by one. Returns for each its tokens, and the times (Unix time,
        seconds) when its first step ended and its last began: it needs its weights between them.
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
        """Make a step without requests, as a server's engine does when all have ended. A core
        in a process of its own makes one by itself."""
        if not self._apart:
            self.step(1)

    def forget_prefixes(self) -> bool:
        """Drop all prefixes from the cache, as in a new engine."""
        return bool(self._llm.reset_prefix_cache())

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The result of the method in each worker."""
        return list(self._llm.collective_rpc(method, args=arguments))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the engine's device memory; its weights wait on the host."""
        self._llm.sleep(level, mode)

    def wake_up(self, *tags: str) -> None:
        self._llm.wake_up(list(tags) or None)

    def cpu_s(self) -> float:
        """CPU seconds of this process, with all its threads."""
        return time.process_time()

    def children(self) -> list[int]:
        """The pids of the processes that it has started."""
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
    os._exit(0)  # its driver is gone: skip the clean-up


if __name__ == "__main__":
    main()
