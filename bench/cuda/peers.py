#!/usr/bin/env python3
"""Times the kernels of torch.nn.SyncBatchNorm on one GPU, over the shapes of bench.cuda and by the same method.

    bench.cuda >ours.jsonl; peers.py >torch.jsonl     on the same machine, one after the other

forward:  batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt
backward: batch_norm_backward_reduce, batch_norm_backward_elemt
"""

import json
import statistics
import sys

import torch

SHAPES = [(64, 256, 56, 56), (256, 64, 112, 112), (32, 512, 28, 28), (256, 1024, 14, 14), (256, 2048, 7, 7),
          (8192, 4096)]
GRID = [(batch, channels) for batch in (32, 64) for channels in (128, 256, 512, 1024)]
ALL_SETS_BYTES = 512 << 20
ROUNDS, RUNS = 15, 20


def median_us(run):
    for i in range(RUNS):
        run(i)
    times = []
    for round_number in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(RUNS):
            run(RUNS * (round_number + 1) + i)
        end.record()
        end.synchronize()
        times.append(1000.0 * begin.elapsed_time(end) / RUNS)
    return statistics.median(times)


def sets_of(shape, dtype, layout):
    tensors, total = [], 0
    while total < ALL_SETS_BYTES or len(tensors) < 2:
        x = torch.randn(shape, device="cuda").to(dtype)
        if layout == "nhwc":
            x = x.contiguous(memory_format=torch.channels_last)
        tensors.append((x, torch.randn_like(x)))
        total += 4 * x.numel() * x.element_size()
    return tensors


def measure(shape, dtype, layout):
    sets = sets_of(shape, dtype, layout)
    channels, eps, momentum = shape[1], 1e-5, 0.1
    weight, bias = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    running_mean, running_var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    number = sets[0][0].numel() // channels
    count = torch.full((1,), number, device="cuda", dtype=torch.float)
    count_int = torch.full((1,), number, device="cuda", dtype=torch.int32)
    # Kept until their set's next turn, lest the allocator hand every run the block of the one before, which is in the cache.
    outputs, gradients = [None] * len(sets), [None] * len(sets)

    def forward(i):
        x = sets[i % len(sets)][0]
        mean, invstd = torch.batch_norm_stats(x, eps)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            x, mean.view(1, -1), invstd.view(1, -1), running_mean, running_var, momentum, eps, count)
        outputs[i % len(sets)] = torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)
        return mean, invstd

    mean, invstd = forward(0)

    def backward(i):
        x, dy = sets[i % len(sets)]
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
        gradients[i % len(sets)] = torch.batch_norm_backward_elemt(
            dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count_int)

    spatial = number // shape[0]
    for what, run in (("forward", forward), ("backward", backward)):
        row = {"who": "torch", "what": what, "element": str(dtype).removeprefix("torch."), "layout": layout,
               "shape": [shape[0], channels, spatial], "us": round(median_us(run), 3)}
        if row["element"] == "float32":
            row["element"] = "float"
        print(json.dumps(row), flush=True)


def main():
    if not torch.cuda.is_available():
        sys.exit("peers.py: no GPU, or a torch without CUDA")
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    with torch.no_grad():
        for shape in SHAPES:
            for layout in ("nchw", "nhwc") if len(shape) == 4 else ("nchw",):
                for dtype in (torch.float, torch.half, torch.bfloat16):
                    measure(shape, dtype, layout)
        for shape in GRID:
            measure(shape, torch.float, "nchw")


if __name__ == "__main__":
    main()
