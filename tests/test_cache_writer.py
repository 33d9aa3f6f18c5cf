"The asynchronous writer: any order of lengths, a disk that fills, a consumer that dies, bounded queues"
import errno
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspec.cache.format import CacheShape, pack_shards, token_nbytes
from deepspec.cache.reader import CacheDataset
from deepspec.cache.writer import AsyncTargetCacheWriter, ShardWriter, write_cache
from deepspec.io import checksum_file

SHAPE = CacheShape(hidden_size=4, num_layers=2)


def sample(seq_len, seed=0):
    "A random sample"
    g = torch.Generator().manual_seed(seed)
    return dict(input_ids=torch.randint(0, 2**31-1, (seq_len,), generator=g, dtype=torch.int32),
                loss_mask=torch.randint(0, 2, (seq_len,), generator=g, dtype=torch.uint8),
                target_hidden_states=torch.randn(seq_len, 8, generator=g).bfloat16(),
                target_last_hidden_states=torch.randn(seq_len, 4, generator=g).bfloat16())


@settings(max_examples=25, deadline=None)
@given(lens=st.lists(st.integers(1, 40), min_size=1, max_size=25), max_shard_bytes=st.integers(1, 3000),
       queue=st.integers(1, 5))
def test_what_goes_in_comes_out(tmp_path_factory, lens, max_shard_bytes, queue):
    folder = tmp_path_factory.mktemp('w')/'shards'
    with AsyncTargetCacheWriter(folder, SHAPE, max_shard_bytes=max_shard_bytes, max_queue_size=queue) as writer:
        for i, n in enumerate(lens): writer.write(sample(n, i))
    written = writer.close()
    assert (written.records == pack_shards(lens, SHAPE, max_shard_bytes)).all()
    for s in written.shards:
        assert (folder/s.file_name).stat().st_size == s.extra['num_bytes']
        assert checksum_file(folder/s.file_name) == s.extra['checksum']
    cache = folder.parent/'cache'
    write_cache(cache, (sample(n, i) for i, n in enumerate(lens)), [0, 1], 4, max_shard_bytes=max_shard_bytes)
    ds = CacheDataset(cache, max_open_shards=2)
    for i, n in enumerate(lens):
        for k, v in sample(n, i).items(): assert torch.equal(ds[i][k], v)


def test_states_of_a_batch_need_no_copy_to_be_written(tmp_path):
    "Rows of a padded batch, a transposed mask: whatever the strides, the bytes are those of the values"
    batch = torch.randn(3, 7, 8).bfloat16()
    tricky = sample(5)|dict(target_hidden_states=batch[1, :5], loss_mask=torch.ones(5, 2, dtype=torch.uint8)[:, 0])
    write_cache(tmp_path/'c', [tricky], [0, 1], 4)
    assert torch.equal(CacheDataset(tmp_path/'c')[0]['target_hidden_states'], batch[1, :5])


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
import torch
from deepspec.cache.format import CacheShape
from deepspec.cache.writer import AsyncTargetCacheWriter
writer = AsyncTargetCacheWriter(sys.argv[1], CacheShape(hidden_size=64, num_layers=2), max_queue_size=2)
sample = dict(input_ids=torch.zeros(100, dtype=torch.int32), loss_mask=torch.ones(100, dtype=torch.uint8),
              target_hidden_states=torch.zeros(100, 128).bfloat16(),
              target_last_hidden_states=torch.zeros(100, 64).bfloat16())
try:
    for i in range(1000): writer.write(sample)
except OSError as e: print(i < 20, e)
"""


def test_a_file_system_that_refuses_more(tmp_path):
    "The kernel's own refusal, by a limit on the size of a file: the caller hears of it within a few samples"
    command = [sys.executable, '-c', FULL_DISK, str(tmp_path/'w')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith('True') and 'File too large' in done.stdout, done


@pytest.mark.parametrize('queue', [1, 2, 7])
def test_death_of_the_thread_wakes_a_waiting_caller(tmp_path, queue):
    "The queue is full and its consumer dies while the caller waits: no deadlock"
    class Dying(ShardWriter):
        def append(self, buffers):
            time.sleep(.1)
            raise OSError(errno.EIO, 'Input/output error')
    writer = AsyncTargetCacheWriter(tmp_path, SHAPE, max_queue_size=queue)
    writer._shards = Dying(tmp_path, SHAPE, 1000)
    with pytest.raises(OSError, match='Input/output error'):
        for _ in range(50): writer.write(sample(3))
    started = time.monotonic()
    with pytest.raises(OSError): writer.close()
    assert time.monotonic()-started < 5 and 'cache-writer' not in {t.name for t in threading.enumerate()}


def test_queue_is_bounded_in_bytes(tmp_path):
    "Never more than the limit waits, and a sample that is larger than the limit still passes"
    seen = []
    class Slow(ShardWriter):
        def append(self, buffers):
            seen.append(writer._queue.nbytes)
            time.sleep(.005)
            super().append(buffers)
    limit = 4*10*token_nbytes(SHAPE)
    writer = AsyncTargetCacheWriter(tmp_path/'a', SHAPE, max_queue_bytes=limit)
    writer._shards = Slow(tmp_path/'a', SHAPE, 1 << 30)
    for n in [10]*20+[500]+[10]*3: writer.write(sample(n))
    writer.close()
    assert max(seen[:15]) <= limit and len(seen) == 24


def test_error_in_the_block_leaves_the_error(tmp_path):
    with pytest.raises(RuntimeError, match='capture failed'):
        with AsyncTargetCacheWriter(tmp_path/'a', SHAPE) as writer:
            writer.write(sample(3))
            raise RuntimeError('capture failed')
    assert not writer._thread.is_alive()
    with pytest.raises(ValueError, match='closed'): writer.write(sample(3))


@pytest.mark.parametrize('change', [
    dict(input_ids=torch.zeros(3, dtype=torch.int64)), dict(loss_mask=torch.zeros(4, dtype=torch.uint8)),
    dict(loss_mask=torch.zeros(3)),
    dict(target_hidden_states=torch.zeros(3, 8)), dict(target_hidden_states=torch.zeros(3, 7).bfloat16()),
    dict(target_last_hidden_states=torch.zeros(2, 4).bfloat16()), dict(input_ids=torch.zeros(0, dtype=torch.int32))])
def test_wrong_tensors_are_refused(tmp_path, change):
    with AsyncTargetCacheWriter(tmp_path, SHAPE) as writer:
        with pytest.raises(ValueError): writer.write(sample(3)|change)


def test_memory_stays_flat(tmp_path):
    "A thousand samples through a queue of eight"
    with AsyncTargetCacheWriter(tmp_path/'a', CacheShape(hidden_size=64, num_layers=5), max_queue_size=8) as writer:
        peak = None
        for i in range(600):
            writer.write(dict(input_ids=torch.zeros(100, dtype=torch.int32),
                              loss_mask=torch.ones(100, dtype=torch.uint8),
                              target_hidden_states=torch.zeros(100, 320).bfloat16(),
                              target_last_hidden_states=torch.zeros(100, 64).bfloat16()))
            if i == 200: peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak+20_000

