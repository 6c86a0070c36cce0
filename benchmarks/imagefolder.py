"""How fast training batches of an image folder come: sparsam's loader beside torchvision's reference pipeline.

The images of a folder (train/CLASS/*) are enlarged to 500x375, about the size of ImageNet's, into a temporary folder,
and hard links repeat them until there are enough. Both pipelines read these files, which the page cache holds: random
resized crop to 224x224, flip, normalise, in batches on the device, with the same number of workers. torchvision's is
ImageFolder, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize and a DataLoader.

Each takes its turn in every round, and the order changes from round to round. A turn is an epoch: it begins when the
first batch is asked for, and ends when the last one is on the device. Workers live on between turns, and the first
turns do not count. What counts is the ratio in the same round: the median over the rounds, and its quartiles. The JSON
holds every round.

    python benchmarks/imagefolder.py --images DIR --workers 16 --output imagefolder.json
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from sparsam.data.image_files import ImageFolderError, load_image_folder
from sparsam.data.image_folder import MEAN, STD, FolderLoader
from sparsam.training.environment import default_device, describe_environment

WIDTH, HEIGHT, CROP = 500, 375, 224


def enlarge(source, target, count, quality, threads):
    """Write `count` training images of a folder, enlarged, or links to them into another; return what they are."""
    from PIL import Image

    files = load_image_folder(source).train
    unique = min(count, len(files))
    # Every so many-th: all classes are there even if not all images are.
    chosen = [files.path(i * len(files) // unique) for i in range(unique)]

    def write(number):
        path = target / "train" / chosen[number].parent.name / f"{number}-0.JPEG"
        with Image.open(chosen[number]) as image:
            larger = image.width > WIDTH or image.height > HEIGHT
            large = image.convert("RGB").resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        large.save(path, quality=quality)
        for copy in range(1, math.ceil((count - number) / unique)):
            path.with_name(f"{number}-{copy}.JPEG").hardlink_to(path)
        return path, larger

    for name in {path.parent.name for path in chosen}:
        (target / "train" / name).mkdir(parents=True)
    with ThreadPoolExecutor(threads) as pool:
        paths, larger = zip(*pool.map(write, range(unique)), strict=True)
    (target / "val" / paths[0].parent.name).mkdir(parents=True)  # sparsam wants images to evaluate on
    (target / "val" / paths[0].parent.name / paths[0].name).hardlink_to(paths[0])
    return {
        "images": f"{'resized' if any(larger) else 'enlarged'} to {WIDTH}x{HEIGHT}",
        "source": Path(source).name,
        "jpeg_quality": quality,
        "mean_kilobytes": statistics.mean(path.stat().st_size for path in paths) / 1000,
        "different_images": unique,
        "images_a_round": count,
    }


def sparsam_pipeline(root, options, device):
    """Return a function that yields the batches of an epoch."""
    return FolderLoader(root, options.batch_size, seed=0, device=device, image_size=CROP, workers=options.workers).epoch


def torchvision_pipeline(root, options, device):
    """Return a function that yields the batches of an epoch."""
    from torchvision import datasets, transforms

    steps = [
        transforms.RandomResizedCrop(CROP),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    loader = DataLoader(
        datasets.ImageFolder(root / "train", transforms.Compose(steps)),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=options.workers > 0,
    )

    def epoch(number):
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return epoch


def turn(epoch, number, options, device):
    """Take one epoch; return the images per second."""
    start, batches = time.perf_counter(), 0
    for x, y in epoch(number):
        assert x.shape == (options.batch_size, 3, CROP, CROP)
        assert (x.dtype, x.device.type, y.device.type) == (torch.float32, device.type, device.type)
        batches += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert batches == options.batches
    return batches * options.batch_size / (time.perf_counter() - start)


def measure(root, options, device):
    """Return the images per second of each pipeline in each round."""
    pipelines = {
        "sparsam": sparsam_pipeline(root, options, device),
        "torchvision": torchvision_pipeline(root, options, device),
    }
    speeds = {name: [] for name in pipelines}
    for number in range(options.rounds + 1):
        names = list(pipelines) if number % 2 else list(reversed(pipelines))
        for name in names:
            speed = turn(pipelines[name], number, options, device)
            if number:  # the first round starts the workers
                speeds[name].append(speed)
                print(f"round {number} of {options.rounds}: {name} {speed:.0f} images/s", file=sys.stderr)
    return speeds


def shared_memory(options):
    """Return how many bytes all batches that wait at once take: two for each worker, float32 in torchvision's."""
    return 2 * options.workers * options.batch_size * 3 * CROP * CROP * 4


def spread(values):
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "n": len(values)}


def show(result):
    """Print the table as Markdown."""
    machine, images = result["environment"], result["data"]
    size = f"JPEG, quality {images['jpeg_quality']}, {images['mean_kilobytes']:.0f} kB on average"
    print(f"\nImages {images['images']} ({size}), {images['images_a_round']} a round,", end=" ")
    print(f"batches of {result['batch_size']}, {result['workers']} workers")
    print(f"{machine['device']}, {machine['processor']}, {result['cores']} cores, torch {machine['torch']},", end=" ")
    print(f"torchvision {result['torchvision']}, Pillow {result['pillow']}, Python {machine['python']}\n")
    print(f"| pipeline | images/s, median of {result['rounds']} rounds (quartiles) | × torchvision (quartiles) |")
    print("| --- | --- | --- |")
    for name, row in result["rows"].items():
        speed, ratio = row["images_per_second"], row["ratio"]
        print(f"| {name} | {speed['median']:.0f} ({speed['low']:.0f} – {speed['high']:.0f}) |", end=" ")
        print(f"{ratio['median']:.2f} ({ratio['low']:.2f} – {ratio['high']:.2f}) |")


def main():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--workers", type=int, default=cores, help=f"of each pipeline (default: the cores, {cores})")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, help="in a round (default: two for each worker)")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2 (default: 5)")
    # Enlarged images are smooth. At this quality their files come closest to those of photographs of that size.
    parser.add_argument("--quality", type=int, default=100, help="of the enlarged JPEGs (default: 100)")
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    if options.batches is None:
        options.batches = 2 * max(options.workers, 1)
    for name, least in (("workers", 0), ("batch_size", 1), ("batches", 1), ("rounds", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, but is {getattr(options, name)}")
    try:
        import PIL
        import torchvision
    except ImportError as error:
        sys.exit(f"this benchmark needs the package {error.name}: pip install torchvision pillow")

    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free < shared_memory(options):
        parser.error(
            f"{memory} must have {shared_memory(options) / 2**20:.0f} MB for waiting batches, but has "
            f"{shutil.disk_usage(memory).free / 2**20:.0f} MB; choose fewer --workers or a smaller --batch-size"
        )

    environment = describe_environment(options.device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = enlarge(options.images, Path(folder), options.batches * options.batch_size, options.quality, cores)
        except ImageFolderError as error:
            parser.error(str(error))
        speeds = measure(Path(folder), options, options.device)
    ratios = {
        name: [own / other for own, other in zip(speeds[name], speeds["torchvision"], strict=True)] for name in speeds
    }
    result = {
        "data": data,
        "environment": environment,
        "cores": cores,
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "workers": options.workers,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "rows": {
            name: {
                "images_per_second": spread(speeds[name]),
                "ratio": spread(ratios[name]),
                "rounds": speeds[name],
            }
            for name in speeds
        },
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
