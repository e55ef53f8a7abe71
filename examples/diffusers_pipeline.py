"""A diffusers pipeline beside its plain run: the same picture, on a device that holds half of it.

    pip install diffusers
    python examples/diffusers_pipeline.py

The pipeline is small and has random weights, so nothing is downloaded. `client.attach` finds its
DiT and its VAE, and loads each before it runs. A real pipeline needs the same line.
"""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

import swapd


def build() -> DiTPipeline:
    dit = DiTTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=64,
        in_channels=4,
        out_channels=8,
        num_layers=6,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(128, 512),
    )
    pipeline = DiTPipeline(transformer=dit.eval(), vae=vae.eval(), scheduler=DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: DiTPipeline) -> torch.Tensor:
    seed = torch.Generator().manual_seed(7)
    done = pipeline([207], num_inference_steps=4, generator=seed, output_type="np")
    return torch.as_tensor(done.images[0])


def main() -> None:
    pipeline = build()
    plain = picture(pipeline)
    for name, part in (("transformer", pipeline.transformer), ("vae", pipeline.vae)):
        print(f"{name}: {sum(p.nbytes for p in part.parameters()) / 2**20:.0f} MiB")
    with swapd.connect(start=True, budget="160MiB") as client:
        client.attach(pipeline)
        attached = picture(pipeline)
        status = client.status()
    print("the same picture" if attached.equal(plain) else "another picture")
    print(f"{status.peak_bytes / 2**20:.0f} MiB of the device at most,", end=" ")
    print(f"{status.loads} loads, {status.bytes_out} bytes copied back")


if __name__ == "__main__":
    main()
