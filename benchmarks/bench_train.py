"""Time and peak memory of a training step at SmolLM2-135M size: plain against chunked loss, 32 to 512 anchors, in one run

python benchmarks/bench_train.py [--anchors 32 64 256 512] [--forms plain chunked] [--steps 2] [--rounds 2]
                                 [--dtype auto] [--out bench_train.json]

Each case runs in a process of its own, since a peak cannot be taken back, and all of them in turn, since a shared machine has bad
minutes. Random weights and features of the right shapes: neither the time nor the memory depends on their values.

Forms: `plain` is the definition of the loss, which keeps several [slots, 49152] tensors and is measured up to --plain-up-to anchors
only; `chunked` is the recipe as it trains, forward and backward over 64 blocks at a time (`blocks_at_once`); `compiled` is `chunked`
with torch.compile; `whole` is the chunked loss with all blocks at once, whose draft activations grow with the number of anchors, and
`recomputed` is `whole` with gradient checkpointing. The bounds checked at the end are the ones the repository promises.
"""
import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial

import torch
from transformers import LlamaConfig

from deepspec.io import human_nbytes, run_record, write_json
from deepspec.model.blocks import compile_around_attention
from deepspec.model.dspark import DSparkModel, dspark_config
from deepspec.train.losses import chunked_terms, dspark_loss, plain_terms
from deepspec.train.optim import MasterAdamW
from deepspec.train.recipes import named_recipe
from deepspec.train.stream import SampleStream, StreamCollator, stream_batches
from deepspec.train.trainer import block_parts, resolve_dtype

SMOLLM2 = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                      num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100_000, rms_norm_eps=1e-5)


def samples(count, length):
    "Random samples as a cache would give them, every token supervised"
    g = torch.Generator().manual_seed(0)
    def one(): return dict(input_ids=torch.randint(5, 49152, (length,), generator=g).int(), loss_mask=torch.ones(length, dtype=torch.uint8),
                           target_hidden_states=torch.randn(length, 5*576, generator=g).bfloat16(), target_last_hidden_states=torch.randn(length, 576, generator=g).bfloat16())
    return [one() for _ in range(count)]


FORMS = ('plain', 'chunked', 'compiled', 'whole', 'recomputed')


def one_case(anchors, form, steps, length, dtype):
    "Seconds of each part of a step (the best of `steps`), and the peak of resident memory in bytes"
    recipe = named_recipe('dspark_smollm2_135m', [f'num_anchors={anchors}', f'dtype={dtype}'])
    draft = DSparkModel(dspark_config(SMOLLM2, recipe.draft))
    draft.init_weights(0)
    draft.to(resolve_dtype(dtype, torch.device('cpu'))).train()
    draft.gradient_checkpointing = form == 'recomputed'
    terms = plain_terms if form == 'plain' else partial(chunked_terms, chunk=recipe.training.loss_chunk)
    if form == 'compiled':
        for layer in draft.layers: compile_around_attention(layer)
    blocks_at_once = recipe.training.blocks_at_once if form in ('chunked', 'compiled') else None
    optimizer = MasterAdamW(draft, recipe.optim, 100)
    stream = SampleStream(samples(2, length), 0)
    batches = iter(stream_batches(stream, [[s] for s in range(steps + 1)], StreamCollator(length, 0, anchors, recipe.draft.block_size), 'cpu'))
    best = None
    for step in range(steps + 1): # the first one warms up
        parts,began = dict(loader=0., forward_loss=0., backward=0., optimizer=0.), time.perf_counter()
        since = began
        def lap(part, parts=parts):
            nonlocal since
            parts[part] += (now := time.perf_counter()) - since
            since = now
        batch = next(batches)
        lap('loader')
        weight = 0.
        for part in block_parts(batch, blocks_at_once):
            sums = dspark_loss(draft, part, part['blocks'], recipe.loss, terms)
            lap('forward_loss')
            sums.total.backward()
            optimizer.accumulate()
            weight += sums.weight.item()
            lap('backward')
        optimizer.finish(step, weight)
        lap('optimizer')
        parts['step'] = since - began
        if step and (best is None or parts['step'] < best['step']): best = parts
    slots = int(batch['blocks'].supervised_NK.sum())
    return dict(anchors=anchors, form=form, slots=slots, peak_nbytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024, **{f'{k}_s': v for k,v in best.items()})


def in_process(args, anchors, form):
    "`one_case` in a fresh interpreter"
    command = [sys.executable, __file__, '--case', f'{anchors},{form}', '--steps', str(args.steps), '--length', str(args.length), '--dtype', args.dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    "Run all cases, print a table, check the bounds"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--anchors', type=int, nargs='+', default=[32, 64, 256, 512])
    parser.add_argument('--plain-up-to', type=int, default=64, help='largest number of anchors for the plain form')
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=FORMS)
    parser.add_argument('--steps', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=2, help='times that all cases are run in turn; the quickest step counts, and the highest peak')
    parser.add_argument('--length', type=int, default=640, help='tokens of the sample in a step')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--out', default=None, help='JSON file for the results')
    parser.add_argument('--case', default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        anchors,form = args.case.split(',')
        print(json.dumps(one_case(int(anchors), form, args.steps, args.length, args.dtype)))
        return
    cases = [(a, f) for a in args.anchors for f in args.forms if f != 'plain' or a <= args.plain_up_to]
    rounds = [[in_process(args, *case) for case in cases] for _ in range(args.rounds)]
    rows = [min(found, key=lambda r: r['step_s'])|dict(peak_nbytes=max(r['peak_nbytes'] for r in found)) for found in zip(*rounds)]
    print(f"{'anchors':>8} {'form':>10} {'slots':>6} {'loader':>8} {'forward+loss':>13} {'backward':>9} {'optimizer':>10} {'step':>8} {'peak':>9}")
    for r in rows:
        print(f"{r['anchors']:>8} {r['form']:>10} {r['slots']:>6} {r['loader_s']:>7.3f}s {r['forward_loss_s']:>12.3f}s {r['backward_s']:>8.3f}s "
              f"{r['optimizer_s']:>9.3f}s {r['step_s']:>7.3f}s {human_nbytes(r['peak_nbytes']):>9}")
    by = {(r['anchors'], r['form']): r for r in rows}
    ratios = {}
    for form,bound in (('chunked', ' (at most 1.2)'), ('compiled', ''), ('whole', ''), ('recomputed', '')):
        if {(32, form), (512, form)} <= set(by): ratios[f'peak memory, 512 over 32 anchors, {form}{bound}'] = by[512, form]['peak_nbytes']/by[32, form]['peak_nbytes']
    if {(64, 'plain'), (64, 'chunked')} <= set(by): ratios['step at 64 anchors, chunked over plain (at most 0.6)'] = by[64, 'chunked']['step_s']/by[64, 'plain']['step_s']
    for a in args.anchors:
        if {(a, 'chunked'), (a, 'compiled')} <= set(by): ratios[f'step at {a} anchors, compiled over chunked'] = by[a, 'compiled']['step_s']/by[a, 'chunked']['step_s']
    for name,value in ratios.items(): print(f'{name}: {value:.2f}')
    if args.out: write_json(args.out, dict(rows=rows, ratios=ratios, run=run_record(**vars(args), threads=torch.get_num_threads())))


if __name__ == '__main__': main()
