"""Writer against raw writes, reader against memcpy, in one run on one disk.

python benchmarks/bench_cache.py --folder DIR [--mb 512] [--hidden-size 576]

Each figure is measured beside its reference, in turns, and the best turn of each counts (for reading, of each batch):
on a shared machine a turn can only be disturbed, never sped up. The page cache is warm for reading, as it is in a
second epoch. `ratio` is the time of read + collate over a memcpy of as many bytes as the batch has, padding included,
from ordinary memory; `ratio_to_samples` over a memcpy of the samples' bytes alone; `ratio_to_file` over a memcpy of the
same samples out of the mapped file, whose pages are small and cost the processor more than ordinary memory does.
`ask_over_memcpy` is the time to ask the kernel ahead for samples that it has already, over a memcpy of their bytes.
"""
import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from deepspec.cache.collate import CacheCollator
from deepspec.cache.format import CacheShape, token_nbytes
from deepspec.cache.prefetch import CUDAPrefetcher
from deepspec.cache.reader import CacheDataset
from deepspec.cache.writer import AsyncTargetCacheWriter, sample_buffers, write_cache
from deepspec.io import run_record

NUM_LAYERS = 5


def make_samples(shape, num_bytes):
    "Random samples of 64 to 1,000 tokens, `num_bytes` together"
    rng, samples = np.random.default_rng(0), []
    while num_bytes > 0:
        n = int(rng.integers(64, 1000))
        states = torch.from_numpy(rng.integers(0, 2**14, (n, (NUM_LAYERS+1)*shape.hidden_size), dtype=np.int16)).view(torch.bfloat16)
        samples.append(dict(input_ids=torch.arange(n, dtype=torch.int32),
                            attention_mask=torch.ones(n, dtype=torch.uint8),
                            loss_mask=torch.ones(n, dtype=torch.uint8),
                            target_hidden_states=states[:, :NUM_LAYERS*shape.hidden_size].contiguous(),
                            target_last_hidden_states=states[:, NUM_LAYERS*shape.hidden_size:].contiguous()))
        num_bytes -= n*token_nbytes(shape)
    return samples


def seconds(f, *args):
    started = time.perf_counter()
    f(*args)
    return time.perf_counter()-started


def raw_write(folder, samples):
    "The same bytes into one file, then fsync"
    with open(folder/'raw', 'wb') as f:
        for s in samples:
            for b in sample_buffers(s): f.write(b)
        f.flush()
        os.fsync(f.fileno())


def our_write(folder, samples):
    shape = CacheShape(hidden_size=samples[0]['target_last_hidden_states'].shape[1], num_layers=NUM_LAYERS)
    with AsyncTargetCacheWriter(folder/'ours', shape) as writer:
        for s in samples: writer.write(s)


def bench_write(folder, samples, turns):
    best = {}
    for _ in range(turns):
        for name, f in (('raw write + fsync', raw_write), ('writer', our_write)):
            os.sync()
            best[name] = min(best.get(name, 9e9), seconds(f, folder, samples))
            shutil.rmtree(folder/'ours', ignore_errors=True)
            (folder/'raw').unlink(missing_ok=True)
    return best


def read(ds, indices, collate): collate(ds.__getitems__(indices))


def ask(ds, indices):
    "What it costs to ask the kernel for samples that it has: the reader stops doing so while the disk is idle"
    for i in indices: ds._advise(ds.records[i])


def copy_mapped(spans, out):
    "Memcpy of samples as they lie in the mapped shard, one behind the other"
    start = 0
    for mapped in spans:
        np.copyto(out[start:start+len(mapped)], mapped)
        start += len(mapped)


def mapped_spans(ds):
    "The bytes of each sample in the mapped shards, without its attention mask"
    maps, width = {}, token_nbytes(ds.manifest.shape)-1
    for shard_id in np.unique(ds.records['shard_id']).tolist(): maps[shard_id] = np.frombuffer(ds._map(shard_id), np.uint8)
    return [maps[int(r['shard_id'])][int(r['input_ids_offset']):][:int(r['seq_len'])*width] for r in ds.records]


def bench_read(ds, turns):
    "Time of read + collate over that of memcpys, best turn of each batch"
    used, rng = ds.seq_lens.astype(int)*(token_nbytes(ds.manifest.shape)-1), np.random.default_rng(1)
    memory = np.full(used.sum(), 7, np.uint8) # as large as the cache: no processor keeps more of it
    results, spans = {}, mapped_spans(ds)
    for batch_size in (1, 8):
        for name, indices in (('sequential', np.arange(len(ds))), ('shuffled', rng.permutation(len(ds))),
                              ('by length', np.argsort(ds.seq_lens))):
            order = [indices[i:i+batch_size].tolist() for i in range(0, len(ds)-batch_size+1, batch_size)]
            sizes = [(int(used[b].sum()), int(used[b].max())*len(b)) for b in order] # of the samples, of the batch
            # a destination for each, so that none finds its own warmer than the others find theirs
            outs, best = [np.full(max(n for _, n in sizes), 1, np.uint8) for _ in range(3)], np.full((len(order), 5), 9e9)
            collate, start = CacheCollator(), 0
            for _ in range(turns+1): # the first turn maps the pages and fills the pool
                for b, (indices_b, pair) in enumerate(zip(order, sizes)):
                    if start+sum(pair) > len(memory): start = 0
                    copied = [seconds(np.copyto, out[:n], memory[o:o+n]) for out, n, o in zip(outs, pair, (start, start+pair[0]))]
                    mapped = seconds(copy_mapped, [spans[i] for i in indices_b], outs[2])
                    took = (*copied, mapped, seconds(read, ds, indices_b, collate), seconds(ask, ds, indices_b))
                    best[b] = np.minimum(best[b], took)
                    start += sum(pair)
            samples_s, batch_s, mapped_s, ours_s, ask_s = best.sum(0).tolist()
            padding = 1-sum(n for n, _ in sizes)/sum(n for _, n in sizes)
            results[f'batch {batch_size}, {name}'] = dict(
                memcpy_s=batch_s, read_collate_s=ours_s, ratio=ours_s/batch_s, ratio_to_samples=ours_s/samples_s,
                ratio_to_file=ours_s/mapped_s, ask_over_memcpy=ask_s/samples_s, padding=padding, gb_per_s=sum(n for n, _ in sizes)/ours_s/1e9)
    return results


def drain(loader):
    for _ in CUDAPrefetcher(loader, device='cpu'): pass


def bench_loader(ds):
    "Gigabytes a second through DataLoader, collator and prefetcher, workers started before the clock"
    results, nbytes = {}, int(ds.seq_lens.sum())*token_nbytes(ds.manifest.shape)
    for workers in (0, 1, 2):
        loader = DataLoader(ds, batch_size=8, shuffle=True, num_workers=workers, collate_fn=CacheCollator(),
                            persistent_workers=workers > 0)
        drain(loader)
        results[f'{workers} workers'] = nbytes/min(seconds(drain, loader) for _ in range(2))/1e9
    return results


def anonymous_mb():
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(l for l in lines if l.startswith('RssAnon')).split()[1])/1000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--folder', default=tempfile.gettempdir())
    parser.add_argument('--hidden-size', type=int, default=576, help='576 is SmolLM2-135M, 2560 is Qwen3-4B')
    parser.add_argument('--mb', type=int, default=512)
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--out')
    args = parser.parse_args()
    if args.folder: Path(args.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        samples = make_samples(CacheShape(hidden_size=args.hidden_size, num_layers=NUM_LAYERS), args.mb*10**6)
        write = bench_write(folder, samples, args.turns)
        write_cache(folder/'cache', samples, list(range(NUM_LAYERS)), args.hidden_size)
        del samples
        ds = CacheDataset(folder/'cache')
        before = anonymous_mb()
        reading = bench_read(ds, args.turns)
        result = dict(write=write|dict(ratio=write['raw write + fsync']/write['writer']), read=reading,
                      loader_gb_per_s=bench_loader(ds), run=run_record(mb=args.mb, turns=args.turns),
                      anonymous_memory_mb=dict(before=before, after=anonymous_mb()))
    finally: shutil.rmtree(folder)
    print(json.dumps({k: v for k, v in result.items() if k != 'run'}, indent=1))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == '__main__': main()
