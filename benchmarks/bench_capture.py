"""Capture against a plain forward pass, and length-bucketed batches against batches in file order, in one run.

python benchmarks/bench_capture.py [--target NAME] [--samples 150] [--turns 3]

Hooks are measured on the target, batches on a toy of its kind, since what padding costs does not depend on the size.
"""
import argparse
import json
import time

import numpy as np
import torch

from deepspec.cache.build import WINDOW_BATCHES, capture_samples, cut_by_sum, token_budget_batches
from deepspec.cache.tokens import Sample
from deepspec.io import run_record
from deepspec.model.target import DEFAULT_TARGET, capture, default_layer_ids, load_target, toy_target


def seconds(f, *args):
    started = time.perf_counter()
    f(*args)
    return time.perf_counter()-started


@torch.no_grad()
def plain(target, ids): target.backbone(input_ids=ids, use_cache=False)


def bench_hooks(target, turns):
    "Time of a capture of five layers over that of the forward pass without hooks, in turns, best of each"
    ids, best = torch.randint(4, 300, (2, 256)), [9e9, 9e9]
    layer_ids = default_layer_ids(target.num_layers, 5)
    for _ in range(turns):
        took = seconds(plain, target, ids), seconds(capture, target, ids, None, layer_ids)
        best = [min(pair) for pair in zip(best, took)]
    return dict(forward_s=best[0], capture_s=best[1], ratio=best[1]/best[0])


def run(target, samples, batches):
    for b in batches: capture_samples(target, [samples[i] for i in b], (1, 3, 5))


def realistic_lens(num_samples):
    "Token counts like those of chat data: most short, a long tail, cut at 2,048"
    return np.minimum(np.random.default_rng(0).lognormal(5.2, .9, num_samples).astype(int)+20, 2048)


def bucketed_batches(lens, max_batch_tokens):
    "The builder's batches"
    windows = cut_by_sum(lens, WINDOW_BATCHES*max_batch_tokens)
    return [(start+np.array(b)).tolist() for start, stop in windows
            for b in token_budget_batches(lens[start:stop], max_batch_tokens)]


def file_order_batches(lens): return [list(range(i, min(i+8, len(lens)))) for i in range(0, len(lens), 8)]


def efficiency(lens, batches):
    "Share of the computed tokens that are no padding"
    return float(lens.sum()/sum(len(b)*lens[b].max() for b in batches))


def bench_batches(target, num_samples, turns, max_batch_tokens=4096):
    "Tokens a second with the builder's batches and with eight samples at a time in file order"
    lens = realistic_lens(num_samples)
    samples = [Sample(i, np.full(n, 7, np.int32), np.ones(n, np.uint8)) for i, n in enumerate(lens)]
    both, best = (bucketed_batches(lens, max_batch_tokens), file_order_batches(lens)), [9e9, 9e9]
    for _ in range(turns): best = [min(t, seconds(run, target, samples, b)) for t, b in zip(best, both)]
    many = realistic_lens(100_000)
    return dict(bucketed_tokens_per_s=lens.sum()/best[0], in_order_tokens_per_s=lens.sum()/best[1],
                ratio=best[1]/best[0],
                padding_efficiency={n: efficiency(many, bucketed_batches(many, n)) for n in (4096, 8192, 16384)},
                in_order_efficiency=efficiency(many, file_order_batches(many)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--target', default=DEFAULT_TARGET)
    parser.add_argument('--samples', type=int, default=150)
    parser.add_argument('--turns', type=int, default=3)
    args = parser.parse_args()
    toy = toy_target('qwen3', num_layers=8, hidden_size=128)
    result = dict(hooks=bench_hooks(load_target(args.target), 3*args.turns),
                  batches=bench_batches(toy, args.samples, args.turns))
    print(json.dumps(result|dict(run=run_record(**vars(args))), indent=1, default=float))


if __name__ == '__main__': main()
