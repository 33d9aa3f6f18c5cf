"Cache protocol version 2: golden bytes made by hand, strangers' manifests, lying indexes"
import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspec.cache.format import (
    INDEX_DTYPE, CacheShape, check_records, pack_shards, tensor_offsets, token_nbytes, unpack_manifest,
    validate_target_cache_manifest, validate_train_cache)
from deepspec.cache.reader import CacheDataset
from deepspec.cache.writer import write_cache

BF16_ONE, BF16_MINUS_TWO, BF16_HALF = 0x3F80, 0xC000, 0x3F00


def golden_sample(seq_len):
    "Tensors whose bytes are easy to write down"
    hidden = torch.tensor([[1., -2., .5, 1.]]*seq_len, dtype=torch.bfloat16)
    return dict(input_ids=torch.arange(seq_len, dtype=torch.int32)+258,
                loss_mask=torch.tensor([0]+[1]*(seq_len-1), dtype=torch.uint8),
                target_hidden_states=hidden, target_last_hidden_states=hidden[:, 1:3].contiguous())


def golden_bytes(seq_len):
    "The same sample by the table of the protocol, without any code of the package"
    return b''.join([struct.pack(f'<{seq_len}i', *range(258, 258+seq_len)), b'\1'*seq_len, b'\0'+b'\1'*(seq_len-1),
                     struct.pack('<4H', BF16_ONE, BF16_MINUS_TWO, BF16_HALF, BF16_ONE)*seq_len,
                     struct.pack('<2H', BF16_MINUS_TWO, BF16_HALF)*seq_len])


def golden_index():
    "Samples of 3, 2 and 1 tokens, 18 bytes each, in shards of at most 90 bytes"
    return b''.join([struct.pack('<QIIQQQQQ', 0, 0, 3, 0, 12, 15, 18, 42),
                     struct.pack('<QIIQQQQQ', 1, 0, 2, 54, 62, 64, 66, 82),
                     struct.pack('<QIIQQQQQ', 2, 1, 1, 0, 4, 5, 6, 14)])


GOLDEN_MANIFEST = dict(version=2, num_samples=3, num_shards=2, target_layer_ids=[-1, 3], hidden_dtype='bfloat16',
                       token_dtype='int32',
                       mask_dtype='uint8', index_record_size=56, hidden_size=2,
                       shards=[dict(shard_id=0, file_name='shard-00000.bin'),
                               dict(shard_id=1, file_name='shard-00001.bin')])


def hand_made(folder, manifest=GOLDEN_MANIFEST, names=('shard-00000.bin', 'shard-00001.bin')):
    "A cache written without the package"
    folder.mkdir()
    (folder/names[0]).write_bytes(golden_bytes(3)+golden_bytes(2))
    (folder/names[1]).write_bytes(golden_bytes(1))
    (folder/'samples.idx').write_bytes(golden_index())
    (folder/'manifest.json').write_text(json.dumps(manifest))
    return folder


def test_writer_writes_the_golden_bytes(tmp_path):
    write_cache(tmp_path/'c', map(golden_sample, (3, 2, 1)), [-1, 3], 2, max_shard_bytes=90)
    hand = hand_made(tmp_path/'hand')
    for name in ('shard-00000.bin', 'shard-00001.bin', 'samples.idx'):
        assert (tmp_path/'c'/name).read_bytes() == (hand/name).read_bytes()
    written = json.loads((tmp_path/'c'/'manifest.json').read_text())
    for key, value in GOLDEN_MANIFEST.items():
        if key != 'shards': assert written[key] == value
    assert [(s['shard_id'], s['file_name'], s['num_bytes']) for s in written['shards']] == [(0, 'shard-00000.bin', 90),
                                                                                            (1, 'shard-00001.bin', 18)]


def test_reader_reads_the_golden_bytes(tmp_path):
    ds = CacheDataset(hand_made(tmp_path/'hand'))
    for sample, n in zip((ds[0], ds[1], ds[2]), (3, 2, 1)):
        for k, v in golden_sample(n).items(): assert torch.equal(sample[k], v), k


def test_other_names_orders_and_unknown_keys(tmp_path):
    names = ('shard_0.bin', 'data.1')
    manifest = dict(reversed(GOLDEN_MANIFEST.items())) | dict(
        colour=['blue', {'deep': None}], shards=[dict(file_name=n, shard_id=i, owner='me') for i,
                                                 n in enumerate(names)])
    ds = CacheDataset(hand_made(tmp_path/'hand', manifest, names))
    assert torch.equal(ds[2]['target_hidden_states'], golden_sample(1)['target_hidden_states'])
    assert ds.manifest.pack()['colour'] == ['blue', {'deep': None}] and ds.manifest.shards[1].pack()['owner'] == 'me'


def shards_with(**change):
    return [dict(shard_id=0, file_name='shard-00000.bin'), dict(shard_id=1, file_name='shard-00001.bin')|change]


@pytest.mark.parametrize('change,message', [
    (dict(version=1), 'version 1'), (dict(version='2'), "version '2'"), (dict(hidden_dtype='float16'), 'float16'),
    (dict(token_dtype='int64'), 'int64'), (dict(mask_dtype='bool'), 'bool'), (dict(index_record_size=40), '40'),
    (dict(num_samples=-1), 'num_samples=-1'), (dict(num_samples=True), 'num_samples=True'),
    (dict(num_samples=3.0), 'num_samples=3.0'),
    (dict(num_samples=2), '168 bytes'), (dict(num_samples=2**39), '168 bytes'),
    (dict(num_samples=2**63), 'num_samples='),
    (dict(hidden_size=0), 'hidden_size=0'), (dict(hidden_size=2**40), 'hidden_size='),
    (dict(hidden_size=4), 'cut short or the index is wrong'),
    (dict(target_layer_ids=[]), 'target_layer_ids'), (dict(target_layer_ids=[3, -1]), 'ascending'),
    (dict(target_layer_ids=[3, 3]), 'ascending'),
    (dict(target_layer_ids=['1', '2']), 'target_layer_ids'), (dict(target_layer_ids=[-2, 1]), 'target_layer_ids'),
    (dict(target_layer_ids=list(range(10_000))), 'target_layer_ids'), (dict(num_shards=3), 'num_shards=3'),
    (dict(shards={}), 'shards of type dict'),
    (dict(shards=shards_with(shard_id=2)), 'shard_id=2'), (dict(shards=shards_with(file_name='absent.bin')),
                                                           'no such file'),
    (dict(shards=shards_with(file_name='../secret')), 'points elsewhere'),
    (dict(shards=shards_with(file_name='/etc/passwd')), 'points elsewhere'),
    (dict(shards=shards_with(file_name='a\\b')), 'points elsewhere'),
    (dict(shards=shards_with(file_name='..')), 'points elsewhere'),
    (dict(shards=shards_with(file_name='')), 'points elsewhere'),
    (dict(shards=shards_with(file_name=None)), 'points elsewhere'),
    (dict(shards=shards_with(file_name='samples.idx')), 'points elsewhere'),
    (dict(shards=shards_with(file_name='shard-00000.bin')), 'twice'),
    (dict(shards=shards_with(num_bytes=17)), 'expected 17'), (dict(shards=[1, 2]), 'shards of type list')])
def test_hostile_manifest_is_refused(tmp_path, change, message):
    folder = hand_made(tmp_path/'hand', GOLDEN_MANIFEST|change)
    with pytest.raises(ValueError) as e: CacheDataset(folder)
    assert message in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('text', ['', '[]', 'null', '{"version": 2}', '{"version": 2', '\ufeff{}'])
def test_manifest_that_is_no_manifest(tmp_path, text):
    folder = hand_made(tmp_path/'hand')
    (folder/'manifest.json').write_text(text)
    with pytest.raises(ValueError, match='manifest.json'): validate_target_cache_manifest(folder)


def test_every_required_key_is_required():
    for key in GOLDEN_MANIFEST:
        with pytest.raises(ValueError, match=key):
            unpack_manifest({k: v for k, v in GOLDEN_MANIFEST.items() if k != key})


def test_a_pipe_is_no_shard(tmp_path):
    import os
    folder = hand_made(tmp_path/'hand')
    (folder/'shard-00001.bin').unlink()
    os.mkfifo(folder/'shard-00001.bin')
    with pytest.raises(ValueError, match='not a file'): CacheDataset(folder)


@pytest.mark.parametrize('field', ['sample_id', 'shard_id', 'seq_len',
                                   *(f for f in INDEX_DTYPE.names if f.endswith('offset'))])
@pytest.mark.parametrize('value', [2**32-1, 2**64-1, 2**63+2**31, 10**6])
def test_lying_record_is_refused(tmp_path, field, value):
    folder = hand_made(tmp_path/'hand')
    records = np.frombuffer(golden_index(), INDEX_DTYPE).copy()
    records[field][1] = value & (2**(8*records.dtype[field].itemsize)-1)
    (folder/'samples.idx').write_bytes(records.tobytes())
    with pytest.raises(ValueError): CacheDataset(folder)


def test_empty_sample_is_refused(tmp_path):
    folder = hand_made(tmp_path/'hand')
    records = np.frombuffer(golden_index(), INDEX_DTYPE).copy()
    records['seq_len'][1] = 0
    (folder/'samples.idx').write_bytes(records.tobytes())
    with pytest.raises(ValueError, match='seq_len=0 in record 1'): CacheDataset(folder)


@pytest.mark.parametrize('cut', range(1, 19))
def test_each_lost_byte_is_found_at_open(tmp_path, cut):
    folder = hand_made(tmp_path/'hand')
    (folder/'shard-00001.bin').write_bytes(golden_bytes(1)[:-cut])
    with pytest.raises(ValueError, match='shard-00001.bin'): CacheDataset(folder)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 2000), st.integers(1, 7), st.integers(1, 9))
def test_packing_follows_the_rule(seq_lens, max_shard_bytes, num_layers, hidden_size):
    shape = CacheShape(hidden_size=hidden_size, num_layers=num_layers)
    records, fill = pack_shards(seq_lens, shape, max_shard_bytes), {}
    for rec, n in zip(records, seq_lens):
        start, shard = int(rec['input_ids_offset']), int(rec['shard_id'])
        assert start == fill.get(shard, 0) and tuple(rec.item()[3:]) == tensor_offsets(shape, n, start)
        if start == 0 and shard: assert fill[shard-1]+n*token_nbytes(shape) > max_shard_bytes
        fill[shard] = start+n*token_nbytes(shape)
        assert start == 0 or fill[shard] <= max_shard_bytes
    manifest = unpack_manifest(GOLDEN_MANIFEST|dict(num_samples=len(records), target_layer_ids=list(range(num_layers)),
                                                    hidden_size=hidden_size,
                               num_shards=len(fill), shards=[dict(shard_id=i, file_name=f's{i}')
                                                             for i in range(len(fill))]))
    sizes = [fill[i] for i in range(len(fill))]
    check_records(records, manifest, sizes)
    for i in range(len(sizes)):
        with pytest.raises(ValueError): check_records(records, manifest, [*sizes[:i], sizes[i]-1, *sizes[i+1:]])


def test_train_cache_lists_every_difference(tmp_path):
    folder = hand_made(tmp_path/'hand', GOLDEN_MANIFEST|dict(target_model_name_or_path='Qwen/Qwen3-4B'))
    validate_train_cache(folder, target_layer_ids=[-1, 3], hidden_size=2, target_model_name_or_path='/models/qwen3-4b/')
    with pytest.raises(ValueError) as e:
        validate_train_cache(folder, target_layer_ids=(1, 3), hidden_size=8, target_model_name_or_path='Qwen/Qwen3-8B')
    assert all(s in str(e.value) for s in ('target_layer_ids', 'hidden_size', 'Qwen3-8B'))


def test_the_house_names():
    from deepspec.data import (  # noqa: F401
        AsyncTargetCacheWriter, CacheCollator, CacheDataset, CUDAPrefetcher, validate_target_cache_manifest,
        validate_train_cache)
