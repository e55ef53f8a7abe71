"""Whole servers, `vllm-omni serve`: API server, orchestrator, a process for each stage.

Nothing of them is of these tests but the platform, the worker classes of AR and generation stages,
and a fork in place of each spawn.
"""

import base64
import hashlib
import json
import os
from contextlib import ExitStack, closing
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.guarantees import harness
from tests.guarantees.harness import Daemon
from tests.vllm.engines import MIB, Nursery, Scene
from tests.vllm.servers import Forked, Server, forked

STAGES = ("thinker", "talker", "code2wav")
#: The name of its process in the log.
THINKER = "StageEngineCoreProc_stage0_replica0"
IMPORTED = "tests.vllm.omni_server.imported"
WORKERS = "tests.vllm.omni_server.workers"

#: Tokens of an answer, and its frames of sound: of Qwen3-Omni, three chunks.
TOKENS, FRAMES = 16, 40

#: Checkpoints (`checkpoints.py`), named as vllm-omni's own deploy files for them.
MODELS = ("qwen2_5_omni", "qwen3_omni_moe")

#: A tiny Qwen-Image, and its component.
IMAGE = "qwen_image"
DIT = f"{IMAGE}.transformer"
EXTENSION = "swapd_client.vllm.diffusion.DiffusionExtension"

CHAT = "/v1/chat/completions"
#: All requests of this process are named so.
REQUESTS = f"swapd-tests-{os.getpid()}-"
_numbers = count()


class Answer(NamedTuple):
    text: str
    #: A digest of its bytes.
    sound: str


class ForkedOmni(Forked):
    """The command line of vllm-omni, in a process that has imported it."""

    main = "vllm_omni.entrypoints.cli.main:main"

    def run(self, *arguments: str) -> None:
        from swapd_client.vllm.cpu import keep_weights

        keep_weights()  # in diffusion stages, whose workers are vllm-omni's own
        super().run(*arguments)


class Starts:
    """Starts servers, which end with `open_`; waits for none."""

    def __init__(self, scene: Scene, nursery: Nursery, open_: ExitStack) -> None:
        """`nursery`: one that has imported `IMPORTED`."""
        self._scene = scene
        self._nursery = nursery
        self._open = open_
        self._started = 0

    def omni(self, name: str, daemon: Daemon | None = None) -> Server:
        """A server of one of `MODELS`, all its stages on `daemon` or plain."""
        deploy = self._scene.folder / f"deploy{self._started}.yaml"
        write_deploy(deploy, name, None if daemon is None else daemon.folder)
        return self._serve(name, "--deploy-config", str(deploy))

    def image(self, daemon: Daemon | None = None) -> Server:
        """A server of `IMAGE`, plain, or on `daemon`, which takes its DiT and encoder in turn."""
        arguments = ["--enforce-eager", "--dtype", "float32"]
        if daemon is not None:
            swapd = {"endpoint": str(daemon.folder), "component": IMAGE}
            arguments += ["--worker-extension-cls", EXTENSION, "--enable-cpu-offload"]
            arguments += ["--additional-config", json.dumps({"swapd": swapd})]
        return self._serve(IMAGE, *arguments)

    def _serve(self, name: str, *arguments: str) -> Server:
        self._started += 1
        path = self._scene.folder / f"{name}{self._started}.sock"
        limit = str(int(2 * harness.PATIENCE_S))
        command = ["serve", str(self._scene.models / name), "--omni", "--served-model-name", name]
        command += ["--uds", str(path), "--init-timeout", limit, "--stage-init-timeout", limit]
        command += arguments
        # so that a stage's scheduler and worker share a process, as on a GPU
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        server = forked(self._nursery, name, path, command, ForkedOmni, **variables)
        return self._open.enter_context(closing(server))


def write_deploy(path: Path, model: str, endpoint: Path | None) -> None:
    """vllm-omni's own deploy file for `model` with the least changes for a CPU; with an `endpoint`,
    all stages are on that daemon.
    """
    found = find_spec("vllm_omni")
    assert found is not None
    assert found.origin is not None
    base = Path(found.origin).parent / "deploy" / f"{model}.yaml"
    stages = [_stage(number, model, endpoint) for number in range(len(STAGES))]
    path.write_text(yaml.safe_dump({"base_config": str(base), "stages": stages}))


def _stage(number: int, model: str, endpoint: Path | None) -> dict[str, object]:
    generates = STAGES[number] == "code2wav"
    stage: dict[str, object] = {
        "stage_id": number,
        "devices": "0",
        # plain vllm-omni computes Qwen2.5's sound in no other
        "dtype": "float32" if generates and model == "qwen2_5_omni" else "bfloat16",
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 8 * MIB,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 1,  # in a batch, sums depend on other requests
        "moe_backend": "auto",
        "default_sampling_params": {
            "temperature": 0.0,
            "ignore_eos": True,
            "max_tokens": (TOKENS, FRAMES, 65536)[number],
        },
    }
    if endpoint is not None:
        kv = {} if generates else {"kv": "auto"}
        stage["worker_cls"] = f"{WORKERS}.{'GenerationWorker' if generates else 'ARWorker'}"
        stage["additional_config"] = {"swapd": {"endpoint": str(endpoint), **kv}}
    return stage


def chat(prompt: str, **more: object) -> dict[str, Any]:
    """The body of a request for text and sound."""
    messages = [{"role": "user", "content": prompt}]
    named = {"request_id": f"{REQUESTS}{next(_numbers)}"}
    return {"messages": messages, "modalities": ["text", "audio"], **named, **more}


def remove_shared_memory() -> None:
    """Remove the messages between stages that nobody read: a stage was killed, or a client left."""
    for left in Path("/dev/shm").glob(f"*{REQUESTS}*"):
        left.unlink(missing_ok=True)


def ask(server: Server, prompt: str) -> Answer:
    said = server.post(CHAT, **chat(prompt))
    messages = [choice["message"] for choice in said["choices"]]
    (text,) = [one["content"] for one in messages if one.get("content")]
    (sound,) = [one["audio"]["data"] for one in messages if one.get("audio")]
    return Answer(text, hashlib.sha256(base64.b64decode(sound)).hexdigest())


def draw(server: Server, prompt: str) -> str:
    """A digest of a picture."""
    size = {"n": 1, "size": "64x64", "seed": 1, "num_inference_steps": 4}
    said = server.post("/v1/images/generations", prompt=prompt, response_format="b64_json", **size)
    (picture,) = said["data"]
    return hashlib.sha256(base64.b64decode(picture["b64_json"])).hexdigest()
