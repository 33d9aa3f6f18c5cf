"Reading: workers, forks and spawns, open files, memory, subsets, remote shards, a million samples"
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

from deepspec.cache.check import cache_info
from deepspec.cache.collate import CacheCollator
from deepspec.cache.format import (
    CacheManifest, CacheShape, INDEX_DTYPE, INDEX_NAME, OFFSET_FIELDS, ShardEntry, pack_shards,
    tensor_token_nbytes, token_nbytes, write_manifest)
from deepspec.cache.prefetch import CUDAPrefetcher
from deepspec.cache.reader import CacheDataset
from deepspec.cache.size import plan_cache
from deepspec.cache.writer import write_cache


def sample(seq_len, seed=0, hidden_size=4):
    "A random sample without zeros in its ids"
    g = torch.Generator().manual_seed(seed)
    return dict(input_ids=torch.randint(1, 9999, (seq_len,), generator=g, dtype=torch.int32),
                loss_mask=torch.randint(0, 2, (seq_len,), generator=g, dtype=torch.uint8),
                target_hidden_states=torch.randn(seq_len, 2*hidden_size, generator=g).bfloat16(),
                target_last_hidden_states=torch.randn(seq_len, hidden_size, generator=g).bfloat16())


LENS = [3, 2, 9, 1, 17, 4, 8, 8, 5, 30, 2, 6]


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    "Twelve samples in several shards"
    folder = tmp_path_factory.mktemp('cache')/'cache'
    write_cache(folder, (sample(n, i) for i, n in enumerate(LENS)), [0, 1], 4, max_shard_bytes=600)
    return folder


def padded(indices):
    "The batch of these samples by the plainest possible code"
    rows, longest = [sample(LENS[i], i) for i in indices], max(LENS[i] for i in indices)
    out = {k: torch.zeros(len(rows), longest, *v.shape[1:], dtype=v.dtype) for k, v in rows[0].items()}
    out['attention_mask'] = torch.zeros(len(rows), longest, dtype=torch.uint8)
    for b, row in enumerate(rows):
        for k, v in row.items(): out[k][b, :len(v)] = v
        out['attention_mask'][b, :len(row['input_ids'])] = 1
    return out


def same(batch, want):
    return set(batch) == set(want) and all(torch.equal(batch[k].to(v.dtype), v) for k, v in want.items())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, len(LENS)-1), min_size=1, max_size=9), st.integers(1, 4))
def test_collated_batches_are_right(cache, indices, max_open_shards):
    ds, collate = CacheDataset(cache, max_open_shards), CacheCollator()
    kept = collate([ds[i] for i in reversed(indices)])
    assert same(collate([ds[i] for i in indices]), padded(indices))
    assert same(collate(ds.__getitems__(indices)), padded(indices))
    assert same(kept, padded(indices[::-1])) # no later batch may touch the memory of one that is still held


@pytest.mark.parametrize('num_workers,context', [(0, None), (1, 'fork'), (2, 'fork'), (1, 'spawn'),
                                                 pytest.param(8, 'fork',
                                                              marks=pytest.mark.slow)]) # eight processes on two cores
def test_loader_gives_the_same_batches(cache, num_workers, context):
    loader = DataLoader(CacheDataset(cache), batch_size=5, num_workers=num_workers, multiprocessing_context=context,
                        collate_fn=CacheCollator())
    for _ in range(1 if context == 'spawn' else 2): # a spawned worker imports torch anew
        batches = list(CUDAPrefetcher(loader, device='cpu'))
        assert len(batches) == 3 and all(b['input_ids'].dtype == torch.int64 for b in batches)
        for b, first in zip(batches, (0, 5, 10)): assert same(b, padded(range(first, min(first+5, 12))))


def test_open_files_are_bounded(cache):
    ds = CacheDataset(cache, max_open_shards=2)
    assert len(ds.manifest.shards) >= 5
    for i in [*range(12), *range(11, -1, -1)]:
        ds[i]
        assert len(ds._maps) <= 2
        maps = Path('/proc/self/maps').read_text()
    assert maps.count('shard-0') <= 3 # the last sample may hold one more
    with pytest.raises(ValueError, match='max_open_shards=0'): CacheDataset(cache, max_open_shards=0)


def test_in_place_writes_stay_in_the_process(cache):
    before = {p.name: p.read_bytes() for p in cache.iterdir()}
    ds = CacheDataset(cache)
    for s in (ds[i] for i in range(12)):
        for t in s.values(): t.zero_()
    del s
    assert {p.name: p.read_bytes() for p in cache.iterdir()} == before


def test_subsets(cache):
    ds = CacheDataset(cache)
    assert [len(ds.skip(a).take(b)) for a, b in ((0, 3), (10, 5), (12, 1), (50, 1), (3, 0))] == [3, 2, 0, 0, 0]
    part = ds.skip(3).take(5).skip(1)
    assert part.seq_lens.tolist() == LENS[4:8] and torch.equal(part[-1]['input_ids'], sample(8, 7)['input_ids'])
    for i in (4, -5):
        with pytest.raises(IndexError): part[i]
    assert part.seq_lens.tolist() == pickle.loads(pickle.dumps(part)).seq_lens.tolist()


def anonymous_kb():
    "Memory of this process that no file backs"
    return int(next(l for l in Path('/proc/self/status').read_text().splitlines()
                    if l.startswith('RssAnon')).split()[1])


def test_memory_is_flat_over_epochs(tmp_path):
    write_cache(tmp_path/'c', (sample(50+i % 40, i, 64) for i in range(300)), [0, 1], 64, max_shard_bytes=1_000_000)
    ds, collate, seen = CacheDataset(tmp_path/'c', max_open_shards=2), CacheCollator(), []
    for epoch in range(6):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(epoch)).tolist()
        for i in range(0, 300, 10): collate(ds.__getitems__(order[i:i+10]))
        seen.append(anonymous_kb())
    assert seen[-1] < seen[1]+2_000, seen


def test_buffers_are_recycled_across_threads(cache):
    "Batches made in the prefetch thread and dropped in the loop come back: a handful of buffers serves all"
    ds, collate, addresses = CacheDataset(cache), CacheCollator(), set()
    for b in CUDAPrefetcher((collate(ds.__getitems__([i % 12, (i+1) % 12])) for i in range(60)), device='cpu'):
        addresses.add(b['target_hidden_states'].data_ptr())
    assert len(addresses) <= 6


# the prefetcher

def test_prefetcher_under_stress():
    "Many short passes with slow consumers, slow producers and early exits: order kept, no thread left"
    for trial in range(20):
        stop_at, n = trial % 7, 9
        pause = .001*(trial % 3)
        def produce(n=n, pause=pause):
            for i in range(n):
                time.sleep(pause)
                yield dict(input_ids=torch.full((1, 3), i, dtype=torch.int32))
        seen = []
        for batch in CUDAPrefetcher(produce(), device='cpu', depth=1+trial % 3):
            seen.append(batch['input_ids'][0, 0].item())
            time.sleep(.001*(trial % 2))
            if len(seen) == stop_at: break
        assert seen == list(range(stop_at or n))
    assert 'prefetch' not in {t.name for t in threading.enumerate()}


def test_prefetcher_hands_over_collate_errors(cache):
    loader = DataLoader(CacheDataset(cache), batch_size=4, collate_fn=lambda samples: 1/0)
    with pytest.raises(ZeroDivisionError): list(CUDAPrefetcher(loader, device='cpu'))
    with pytest.raises(ValueError, match='depth=0'): CUDAPrefetcher([], device='cpu', depth=0)
    assert list(CUDAPrefetcher([], device='cpu')) == []


def test_consumer_error_stops_the_thread(cache):
    loader = DataLoader(CacheDataset(cache), batch_size=1, collate_fn=CacheCollator())
    with pytest.raises(KeyError):
        for _ in CUDAPrefetcher(loader, device='cpu'): raise KeyError('training step')
    import gc
    gc.collect()
    assert 'prefetch' not in {t.name for t in threading.enumerate()}


@pytest.mark.gpu
def test_prefetcher_on_cuda(cache):
    loader = DataLoader(CacheDataset(cache), batch_size=5, collate_fn=CacheCollator())
    for b, first in zip(CUDAPrefetcher(loader), (0, 5, 10)):
        assert same({k: v.cpu() for k, v in b.items()}, padded(range(first, min(first+5, 12))))


# remote caches

def test_remote_cache_reads_alike_in_bounded_space(cache, cache_home, tmp_path):
    url, ds = 'file://'+str(cache), CacheDataset(cache)
    biggest = max(s.extra['num_bytes'] for s in ds.manifest.shards)
    remote = CacheDataset(url, max_open_shards=1, max_local_bytes=2*biggest)
    for i in [*range(12), *np.random.default_rng(0).permutation(12).tolist()]:
        assert all(torch.equal(a, b) for a, b in zip(ds[i].values(), remote[i].values()))
        assert sum(p.stat().st_size for p in cache_home.rglob('shard-*')) <= 2*biggest


def test_remote_cache_in_workers(cache, cache_home):
    loader = DataLoader(CacheDataset('file://'+str(cache), max_local_bytes=700), batch_size=4, num_workers=2,
                        collate_fn=CacheCollator())
    for b, first in zip(loader, (0, 4, 8)): assert same(b, padded(range(first, first+4)))


def test_remote_cache_that_is_damaged(cache, cache_home, tmp_path):
    import shutil
    shutil.copytree(cache, tmp_path/'c')
    last = sorted((tmp_path/'c').glob('shard-*'))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=last.name): CacheDataset(f"file://{tmp_path/'c'}")
    (tmp_path/'c'/'manifest.json').unlink()
    with pytest.raises(ValueError, match='finish the build'): CacheDataset(f"file://{tmp_path/'c'}")


# scale

@pytest.fixture(scope='module')
def huge(tmp_path_factory):
    "1.3 million samples in about 600 sparse shards: the size of Open-PerfectBlend with Qwen3-4B"
    folder, shape = tmp_path_factory.mktemp('huge'), CacheShape(hidden_size=2560, num_layers=5)
    lens = np.random.default_rng(0).integers(200, 1800, 1_300_000)
    ends = np.cumsum(lens)*token_nbytes(shape)
    shard = (ends//(64 << 30)).astype(np.uint32)
    firsts = np.searchsorted(shard, np.arange(shard[-1]+1))
    base = np.concatenate([[0], ends])[firsts][shard]
    records = np.empty(len(lens), INDEX_DTYPE)
    records['sample_id'], records['shard_id'], records['seq_len'] = np.arange(len(lens)), shard, lens
    offset = ends-lens*token_nbytes(shape)-base
    for field, n in zip(OFFSET_FIELDS, tensor_token_nbytes(shape)):
        records[field] = offset
        offset = offset+lens*n
    (folder/INDEX_NAME).write_bytes(records.tobytes())
    shards = tuple(ShardEntry(shard_id=i, file_name=f'shard-{i:05d}.bin') for i in range(len(firsts)))
    sizes = np.append(ends[firsts[1:]-1], ends[-1])-np.concatenate([[0], ends])[firsts]
    for s, n in zip(shards, sizes.tolist()):
        with open(folder/s.file_name, 'wb') as f: os.truncate(f.fileno(), n)
    write_manifest(folder, CacheManifest(num_samples=len(lens), target_layer_ids=(1, 9, 17, 25, 33), hidden_size=2560,
                                         shards=shards))
    return folder


def timed(f):
    "Result and processor seconds: other processes of the machine do not count"
    started = time.process_time()
    result = f()
    return result, time.process_time()-started


def test_a_million_samples(huge):
    before = anonymous_kb()
    ds, open_s = timed(lambda: CacheDataset(huge))
    assert len(ds) == 1_300_000 and len(ds.manifest.shards) > 550 and open_s < 1, open_s
    order = np.random.default_rng(0).permutation(len(ds))
    def epoch():
        for i in order.tolist(): ds.records[i].item()
    _, epoch_s = timed(epoch)
    assert epoch_s < 15, epoch_s
    _, read_s = timed(lambda: [ds[i] for i in order[:500].tolist()])
    assert read_s < 2, read_s
    info, info_s = timed(lambda: cache_info(huge))
    assert info.num_bytes > 3.9e13 and info_s < 1, info_s
    plan, plan_s = timed(lambda: plan_cache(CacheShape(hidden_size=2560, num_layers=5), ds.seq_lens))
    assert plan.num_bytes == info.num_bytes+56*1_300_000 and plan_s < 1
    assert anonymous_kb() < before+40_000
    assert len(pickle.dumps(ds)) < 100_000 # what each spawned worker receives


def test_packing_a_million_lengths_is_quick():
    lens = np.random.default_rng(0).integers(200, 1800, 100_000)
    _, s = timed(lambda: pack_shards(lens, CacheShape(hidden_size=2560, num_layers=5)))
    assert s < 3, s
