"""Cost of the Titans memory, each figure beside its reference in one run

python benchmarks/bench_longmem.py [--out FILE]   (about a minute on one quiet core)
"""
import argparse, json, os, statistics, subprocess, sys, threading, time
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from deepspec.io import run_record, write_json
from deepspec.longmem.memory import Gates, MemoryState, write_memory
from deepspec.longmem.model import QwenTitansForBABILong, tiny_qwen


def cpu_s(run) -> float:
    "CPU seconds of a call; on one thread that is its time on an idle machine, whatever else runs on this one"
    started = time.process_time()
    run()
    return time.process_time() - started


def paired_s(*runs, repeats: int = 15) -> list:
    "Median CPU seconds of each call, taken in turn after a warm-up"
    for run in runs: run()
    times = [[cpu_s(run) for run in runs] for _ in range(repeats)]
    return [statistics.median(t) for t in zip(*times)]


def tiny_model(chunk_size: int = 256) -> QwenTitansForBABILong:
    "Hidden 64, 2 layers, memory at layer 0"
    torch.manual_seed(0)
    return QwenTitansForBABILong(tiny_qwen(), (0,), chunk_size=chunk_size, from_scratch=True)


def overhead(length: int = 2048) -> dict:
    "Tokens/s of a training pass (forward and backward) with the memory and without"
    model = tiny_model()
    ids = torch.randint(0, 1024, (1, length))

    def step(memory):  # every position has a label, so that both pass gradients through every chunk
        model(ids, labels=ids, memory=memory).loss.backward()
        model.zero_grad()

    def read(memory):
        with torch.no_grad(): model(ids, labels=ids, memory=memory)
    out = {}
    for name, run in (('train', step), ('read', read)):
        on, off = paired_s(partial(run, 'on'), partial(run, 'off'))
        out[name] = dict(memory_tokens_per_s=length/on, plain_tokens_per_s=length/off, overhead=on/off - 1)
    return out


def against_recurrence(length: int = 1024) -> dict:
    "The closed-form write against the same rule token by token"
    g = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(1, 4, length, 32, generator=g), dim=-1)
    v, unit = torch.randn(1, 4, length, 32, generator=g), torch.rand(1, 4, length, generator=g)
    gates = Gates(unit*.01, torch.log1p(-unit*.05), None, torch.ones_like(unit))
    empty = MemoryState(torch.zeros(1, 4, 32, 32), None, None, None)

    def slow():
        w = empty.w1
        for i in range(length):
            if i % 64 == 0: start = w
            error = k[..., i:i + 1, :] @ start.mT - v[..., i:i + 1, :]
            step = gates.theta[..., i, None, None]*(error.mT @ k[..., i:i + 1, :])
            w = gates.log_keep[..., i].exp()[..., None, None]*w - step
        return w
    with torch.no_grad():
        torch.testing.assert_close(write_memory(empty, k, v, gates, 64).w1, slow(), rtol=1e-4, atol=1e-5)
        fast_s, slow_s = paired_s(lambda: write_memory(empty, k, v, gates, 64), slow)
    return dict(closed_form_tokens_per_s=length/fast_s, recurrence_tokens_per_s=length/slow_s, speedup=slow_s/fast_s)


def training_peak(num_chunks: int, chunk_size: int = 2048) -> int:
    "Most bytes a training pass adds to this process; only meaningful in a fresh one"
    model = tiny_model(chunk_size)
    ids = torch.randint(0, 1024, (1, num_chunks*chunk_size))
    labels = ids.clone()
    labels[:, :-2] = -100
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    model(ids[:, :8], labels=ids[:, :8]).loss.backward()  # libraries and buffers first
    rss = lambda: int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')
    before, seen, done = rss(), [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(rss())
            time.sleep(.001)
    thread = threading.Thread(target=watch)
    thread.start()
    model(ids, labels=labels).loss.backward()
    done.set()
    thread.join()
    return max(seen) - before


def peaks() -> dict:
    "Peak memory of training at 8 chunks and at 1, each in a process of its own"
    env = os.environ | dict(MALLOC_MMAP_THRESHOLD_='65536')  # a freed tensor leaves the process at once

    def fresh(n):
        command = [sys.executable, __file__, '--peak', str(n)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    one, eight = fresh(1), fresh(8)
    return dict(one_chunk_nbytes=one, eight_chunks_nbytes=eight, ratio=eight/one)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', help='JSON file for the results')
    parser.add_argument('--peak', type=int, help='only print the peak of this many chunks')
    args = parser.parse_args()
    if args.peak: print(training_peak(args.peak))
    else:
        torch.set_num_threads(1)
        found = dict(overhead=overhead(), recurrence=against_recurrence(), training_memory=peaks())
        print(json.dumps(found, indent=2))
        if args.out: write_json(args.out, found | dict(run=run_record(threads=1)))
