"""Ray actors with fractions of a GPU that share one daemon for each GPU.

`python share.py` runs it on a machine with a GPU; README.md beside this file explains it.
"""

import ray

import swapd

#: The budget of all actors of one GPU together; their other memory is outside of it.
BUDGET = "40GiB"


def connect(
    label: str, budget: str = BUDGET, device: str = "cuda:0", where: str = "/tmp/swapd-ray"
) -> swapd.Client:
    """A session with the daemon of the GPU that Ray has given this actor, started if there is none.

    Ray shows an actor its own GPU only, so each actor calls it cuda:0. The folder is named after
    Ray's number for the GPU, which distinguishes the daemons of one machine. The daemon inherits
    $CUDA_VISIBLE_DEVICES of the actor that starts it.
    """
    gpu = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
    folder = f"{where}/gpu{gpu}"
    return swapd.connect(folder, device=device, start=True, budget=budget, label=label)


@ray.remote(num_gpus=0.5)
class Stage:
    """One stage of a model. Two of them share a GPU that cannot hold both."""

    def __init__(self, name: str) -> None:
        import torch

        self._name = name
        self._model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(80)])
        self._client = connect(name)
        self._client.attach({name: self._model})

    def run(self, x: "object") -> "object":
        import torch

        with torch.inference_mode():
            return self._model(torch.as_tensor(x, device="cuda:0")).cpu()

    def close(self) -> None:
        """Close the client in order; the daemon also notices the end of an actor without this."""
        self._client.close()


if __name__ == "__main__":
    import torch

    ray.init()
    stages = [Stage.remote(name) for name in ("encoder", "decoder")]  # type: ignore[attr-defined]
    x = torch.randn(1, 8192)
    for stage in stages:
        x = ray.get(stage.run.remote(x))
    ray.get([stage.close.remote() for stage in stages])
