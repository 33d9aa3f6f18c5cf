"""Capture against a plain forward pass, and length-bucketed batches against batches in file order, in one run.

python benchmarks/bench_capture.py [--samples 150] [--turns 3]
"""
import argparse
import json
import time

import numpy as np
import torch

from deepspec.cache.build import WINDOW_BATCHES, capture_samples, cut_by_sum, token_budget_batches
from deepspec.cache.tokens import Sample
from deepspec.io import run_record
from deepspec.model.target import capture, toy_target


def seconds(f, *args):
    started = time.perf_counter()
    f(*args)
    return time.perf_counter()-started


@torch.no_grad()
def plain(target, ids): target.backbone(input_ids=ids, use_cache=False)


def bench_hooks(target, turns):
    "Time of a capture of four layers over that of the forward pass without hooks, in turns, best of each"
    ids, best = torch.randint(4, 300, (4, 512)), [9e9, 9e9]
    for _ in range(turns):
        took = seconds(plain, target, ids), seconds(capture, target, ids, None, (-1, 1, 3, 5))
        best = [min(pair) for pair in zip(best, took)]
    return dict(forward_s=best[0], capture_s=best[1], ratio=best[1]/best[0])


def run(target, samples, batches):
    for b in batches: capture_samples(target, [samples[i] for i in b], (1, 3, 5))


def bench_batches(target, num_samples, turns, max_batch_tokens=4096):
    "Tokens a second with length-bucketed batches and with eight samples at a time in file order"
    lens = np.minimum(np.random.default_rng(0).lognormal(5.2, .9, num_samples).astype(int)+20, 2048)
    samples = [Sample(i, np.full(n, 7, np.int32), np.ones(n, np.uint8)) for i, n in enumerate(lens)]
    bucketed = [(start+np.array(b)).tolist() for start, stop in cut_by_sum(lens, WINDOW_BATCHES*max_batch_tokens)
                for b in token_budget_batches(lens[start:stop], max_batch_tokens)]
    in_order = [list(range(i, min(i+8, num_samples))) for i in range(0, num_samples, 8)]
    best = [9e9, 9e9]
    for _ in range(turns):
        took = seconds(run, target, samples, bucketed), seconds(run, target, samples, in_order)
        best = [min(pair) for pair in zip(best, took)]
    used = [float(lens.sum()/sum(len(b)*lens[b].max() for b in batches)) for batches in (bucketed, in_order)]
    return dict(bucketed_tokens_per_s=lens.sum()/best[0], in_order_tokens_per_s=lens.sum()/best[1],
                ratio=best[1]/best[0], bucketed_efficiency=used[0], in_order_efficiency=used[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--samples', type=int, default=150)
    parser.add_argument('--turns', type=int, default=3)
    args = parser.parse_args()
    target = toy_target('qwen3', num_layers=8, hidden_size=128)
    result = dict(hooks=bench_hooks(target, 3*args.turns), batches=bench_batches(target, args.samples, args.turns))
    print(json.dumps(result|dict(run=run_record(**vars(args))), indent=1, default=float))


if __name__ == '__main__': main()
