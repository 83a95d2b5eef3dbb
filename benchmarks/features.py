"""What a frozen image encoder makes of many images: images a second, as a share of this machine's products.

Reads the images of the recipe `flickr8k` (or of --recipe) into an empty cache, as the first training would, and counts
how often an image is decoded. The roof is the fastest matrix product of the same threads in the same run.

    REGARD_DATA=... python benchmarks/features.py --threads 2
"""

import argparse
import os
import resource
import tempfile
import time

import torch
from torch.utils.flop_counter import FlopCounterMode
from train import heading, roof

from regard.config.toml import read
from regard.data import encoding
from regard.data.images.pixels import Opened
from regard.training.prepare import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="flickr8k")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prepared = prepare(read(options.recipe))
    examples = [*prepared.splits.train, *prepared.splits.valid]
    task = prepared.task
    model = task.build().eval()
    task.initialize(model, lambda: [], print)
    read_image, decoded = encoding.read_image, list[str]()

    def count_image(data: bytes, name: str) -> Opened:
        decoded.append(name)
        return read_image(data, name)

    encoding.read_image = count_image
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.encoder(torch.zeros(1, 3, model.encoder.pixels, model.encoder.pixels))
    work, best = counter.get_total_flops(), roof(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REGARD_CACHE"] = folder
        began = time.perf_counter()
        task.warm(model, examples, lambda done, of: print(f"{done:,} of {of:,}", end="\r", flush=True))
        seconds = time.perf_counter() - began
    images = len({example.source for example in examples})
    speed, most = images / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{heading()}, {options.threads} threads, products {best / 1e9:,.0f} GF/s, an image {work / 1e9:.2f} GF")
    print(f"{images:,} images in {seconds:,.0f} s: {speed:.1f} a second, {speed * work / best:.2f} of the roof")
    print(f"decoded {len(decoded):,} times, {len(set(decoded)):,} of them different; the process had {most:.2f} GB")


if __name__ == "__main__":
    main()
