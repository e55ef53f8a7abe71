"""A vLLM engine that shares its device with another model.

    python examples/vllm_stage.py MODEL [BUDGET]

The engine's weights and KV cache take turns with a plain PyTorch model of half the budget. The
engine gives way when it has no requests, comes back with its next one, and answers the same.
"""

import sys

import torch
from vllm import LLM, SamplingParams

import swapd
from swapd.shared.units import parse_size

WORKERS = {True: "swapd_client.vllm.worker.Worker", False: "swapd_client.vllm.cpu.CPUWorker"}


def answer(llm: LLM) -> list[int]:
    greedy = SamplingParams(max_tokens=16, temperature=0, detokenize=False)
    (done,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, greedy, use_tqdm=False)
    return list(done.outputs[0].token_ids)


def main(model: str, budget: str = "40GiB") -> None:
    device = "cuda:0" if torch.cuda.is_available() else "host"
    width = 2048
    layers = parse_size(budget) // 2 // (4 * width * width)
    with swapd.connect(start=True, device=device, budget=budget) as client:
        other = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
        client.register("other", other)
        llm = LLM(
            model,
            worker_cls=WORKERS[device != "host"],
            additional_config={"swapd": {"component": "engine", "kv": "auto"}},
            kv_cache_memory_bytes=parse_size(budget) // 4,
            max_model_len=256,
            enable_prefix_caching=False,  # else its KV cache is saved when the engine gives way
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
        first = answer(llm)
        with client.acquire("other"), torch.inference_mode():  # the engine gives way
            other(torch.ones(1, width, device=device.replace("host", "cpu")))
        print("the same tokens" if answer(llm) == first else "other tokens", first)
        status = client.status()
        print(f"{status.evictions} evictions, {status.bytes_out} bytes copied back")


if __name__ == "__main__":
    main(*sys.argv[1:])
