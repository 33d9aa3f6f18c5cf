"A toy target folder, a toy cache and recipes on them, for tests of the trainer"
import json
from dataclasses import replace
from pathlib import Path

import torch

from deepspec.cache.format import CacheShape
from deepspec.cache.writer import AsyncTargetCacheWriter, finish_cache
from deepspec.model.target import capture, save_toy_target, toy_target
from deepspec.train.recipes import dspark_toy, eagle3_toy

LAYERS = (0, 1)


def toy_samples(target, num_samples=10, seed=0, silent=()):
    "Random conversations; those in `silent` supervise nothing"
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(num_samples):
        n = int(torch.randint(8, 30, (1,), generator=g))
        ids = torch.randint(4, target.vocab_size, (n,), generator=g)
        mask = torch.ones(n, dtype=torch.uint8)*(i not in silent)
        mask[:3] = 0
        hidden,last = capture(target, ids[None], None, LAYERS)
        out.append(dict(input_ids=ids.int(), loss_mask=mask, target_hidden_states=hidden[0].bfloat16(), target_last_hidden_states=last[0].bfloat16()))
    return out


def write_cache(folder, samples, hidden_size):
    "A one-shard cache"
    Path(folder).mkdir(parents=True)
    writer = AsyncTargetCacheWriter(folder, CacheShape(hidden_size=hidden_size, num_layers=len(LAYERS)))
    for s in samples: writer.write(s)
    finish_cache(folder, writer.close(), LAYERS, hidden_size)
    return str(folder)


def toy_job(folder, kind='dspark', num_samples=10, silent=(), **training):
    "A target and a cache in `folder`, and the recipe that trains on them"
    target = toy_target()
    save_toy_target(folder/'target')
    cache = write_cache(folder/'cache', toy_samples(target, num_samples, silent=silent), target.hidden_size)
    recipe = dict(dspark=dspark_toy, eagle3=eagle3_toy)[kind]()
    settings = dict(max_steps=8, global_batch_size=4, micro_batch_size=2, save_steps=3, keep_last=9) | training
    return replace(recipe, target=str(folder/'target'), training=replace(recipe.training, **settings)), cache


def write_rows(path, num_rows=10):
    "Conversations of different lengths, every answer long enough to be trained on"
    said = lambda i: [dict(role='user', content=f'Question {i}?'), dict(role='assistant', content=f'Answer {i} ' + 'goes on, '*(3 + i % 4))]
    Path(path).write_text(''.join(json.dumps(dict(id=str(i), conversations=said(i))) + '\n' for i in range(num_rows)))
    return path


def records(out_dir): return [json.loads(l) for l in (Path(out_dir)/'metrics.jsonl').read_text().splitlines()]
def losses(out_dir): return [r['loss'] for r in records(out_dir)]
