"""Time of making loss masks and indexes, each beside its limit in the same run.

    python benchmarks/bench_data.py [--tokenizer FOLDER] [--seconds 2]
    python benchmarks/bench_data.py --rows 1300000

Masks: the limit is what nobody can avoid, rendering every conversation and one batched encode of the texts.
`ours / limit` must stay below 1.25 for 1, 5 and 20 turns, and the time per turn must not grow with the turns.
Index: the limit is a loop of `readline` over the memory map that finds the same rows.
With `--rows`, only the peak memory of splitting so many rows, indexing them and reading them once.
"""

import argparse
import json
import mmap
import os
import random
import tempfile
import threading
import time
from pathlib import Path

from deepspec.data.jsonl import JsonLineDataset, row_offsets
from deepspec.data.prompts import split_prompts
from deepspec.data.template import resolve_template, tokenize_conversations

WORDS = (
    'the of and to in is that for it as was with be by on not he his but at are this have from or had an they which '
    'one you were all her she there would their we him been has when who will no more if out so up said what its '
    'about than into them can only other time new some could these two may first then do any like my now over such '
    'our man me even most made after also did many before must through '
).split()


def bytes_tokenizer():
    "A byte-level BPE trained on the benchmark's own words, where no other tokenizer is named"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from deepspec.data.template import TEMPLATE_REGISTRY, jinja_source

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([' '.join(WORDS)] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token='<|im_end|>', chat_template=jinja_source(TEMPLATE_REGISTRY['chatml'])
    )
    tokenizer.add_special_tokens(dict(additional_special_tokens=['<|im_start|>', '<|im_end|>']))
    return tokenizer


def make_rows(num_rows, num_turns, rng, num_words=80):
    "Conversations of `num_turns` user and assistant turns"

    def text():
        return ' '.join(rng.choices(WORDS, k=rng.randint(num_words // 2, num_words * 3 // 2))).capitalize() + '.'

    return [
        dict(
            id=str(i),
            conversations=[dict(role=r, content=text()) for _ in range(num_turns) for r in ('user', 'assistant')],
        )
        for i in range(num_rows)
    ]


def best(seconds, *functions):
    "Shortest run of each function; they take turns, so that a busy moment of the machine meets them all"
    times, until = [[] for _ in functions], time.perf_counter() + seconds * len(functions)
    while len(times[0]) < 3 or time.perf_counter() < until:
        for function, took in zip(functions, times):
            start = time.perf_counter()
            function()
            took.append(time.perf_counter() - start)
    return [min(took) for took in times]


def bench_masks(tokenizer, seconds):
    "Ratio of our time to the limit for 1, 5 and 20 turns"
    template, rng = resolve_template(tokenizer), random.Random(0)
    print(f"{'turns':>6} {'rows':>6} {'tokens':>8} {'limit ms':>9} {'ours ms':>9} {'ratio':>6} {'ours us/turn':>13}")
    for turns in (1, 5, 20):
        rows = make_rows(800 // turns, turns, rng)
        chats = [r['conversations'] for r in rows]

        def limit(chats=chats):
            tokenizer(tokenizer.apply_chat_template(chats, tokenize=False), add_special_tokens=False)

        def ours(rows=rows):
            return tokenize_conversations(rows, tokenizer, template)

        num_tokens = sum(d.num_tokens for d in ours())
        limit_s, ours_s = best(seconds, limit, ours)
        times = f"{limit_s * 1e3:9.1f} {ours_s * 1e3:9.1f} {ours_s / limit_s:6.2f}"
        print(f"{turns:6} {len(rows):6} {num_tokens:8} {times} {ours_s * 1e6 / len(rows) / turns:13.0f}")


def readline_offsets(data):
    "Row starts by a loop of readline that leaves blank lines out"
    data.seek(0)
    starts, at = [], 0
    while line := data.readline():
        if not line.isspace():
            starts.append(at)
        at += len(line)
    return starts


def bench_index(seconds, num_nbytes, words):
    "Index build beside a readline loop, and reading with the index there"
    with tempfile.TemporaryDirectory() as folder:
        os.environ['DEEPSPEC_CACHE_DIR'] = folder
        path, rng = Path(folder) / 'rows.jsonl', random.Random(0)
        line = '\n'.join(json.dumps(r) for r in make_rows(500, 2, rng, words)) + '\n'
        path.write_text(line * max(num_nbytes // len(line), 1))
        with open(path, 'rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            limit_s, ours_s = best(seconds, lambda: readline_offsets(data), lambda: row_offsets(data))
            print(
                f"index of {len(data) / 1e6:.0f} MB, {words} words a turn: readline {limit_s * 1e3:.1f} ms, "
                f"ours {ours_s * 1e3:.1f} ms ({len(data) / ours_s / 1e9:.1f} GB/s), ratio {ours_s / limit_s:.2f}"
            )
        rows = JsonLineDataset(path)
        (open_s,) = best(seconds / 4, lambda: JsonLineDataset(path))
        order = rng.sample(range(len(rows)), 2000)
        raw = [rows.files[0].raw(i) for i in order]
        read_s, parse_s = best(seconds / 2, lambda: [rows[i] for i in order], lambda: [json.loads(r) for r in raw])
        print(
            f"open with the index there: {open_s * 1e3:.2f} ms; random row {read_s / 2000 * 1e6:.1f} us, "
            f"of which JSON parsing {parse_s / 2000 * 1e6:.1f} us"
        )


class PeakMemory(threading.Thread):
    "Highest memory of this process that no file backs, in MB above the start, looked at every 20 ms while inside `with`"

    def __enter__(self):
        self.over, self.start_mb, self.peak_mb = threading.Event(), self.now(), 0
        self.start()
        return self

    def now(self):
        lines = Path('/proc/self/status').read_text().splitlines()
        return int(next(x for x in lines if x.startswith('RssAnon')).split()[1]) / 1000

    def run(self):
        while not self.over.wait(0.02):
            self.peak_mb = max(self.peak_mb, self.now() - self.start_mb)

    def __exit__(self, *_):
        self.over.set()
        self.join()


def write_rows(path, num_rows):
    "Distinct conversations, two turns each"
    chats = [r['conversations'] for r in make_rows(1000, 2, random.Random(0), 30)]
    with open(path, 'w') as f:
        for i in range(num_rows):
            first, *rest = chats[i % 1000]
            first = dict(first, content=f"{i}: {first['content']}")
            f.write(json.dumps(dict(id=str(i), conversations=[first, *rest])) + '\n')


def bench_memory(num_rows):
    "Peak memory of splitting, indexing and reading a tenth of `num_rows` rows, then all of them"
    with tempfile.TemporaryDirectory() as folder:
        os.environ['DEEPSPEC_CACHE_DIR'] = folder
        for count in (num_rows // 10, num_rows):
            source, out = Path(folder) / f'{count}.jsonl', Path(folder) / str(count)
            write_rows(source, count)
            started = time.perf_counter()
            with PeakMemory() as splitting:
                split_prompts(source, out)
            with PeakMemory() as reading:
                rows = JsonLineDataset(out / 'train.jsonl')
                for i in range(len(rows)):
                    rows[i]
            took = f"{time.perf_counter() - started:.0f} s"
            print(
                f"{count} rows, {source.stat().st_size / 1e6:.0f} MB, {took}: peak while splitting "
                f"{splitting.peak_mb:+.0f} MB, while indexing and reading {reading.peak_mb:+.0f} MB"
            )


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--tokenizer',
        help='folder or name of a tokenizer with a chat template; a small one is trained where this is left out',
    )
    parser.add_argument('--seconds', type=float, default=2, help='time for each measurement')
    parser.add_argument('--mbytes', type=int, default=100, help='size of the file to index')
    parser.add_argument('--rows', type=int, help='measure memory over so many rows instead')
    args = parser.parse_args()
    if args.rows:
        raise SystemExit(bench_memory(args.rows))
    if args.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = bytes_tokenizer()
    bench_masks(tokenizer, args.seconds)
    for words in (20, 80, 400):
        bench_index(args.seconds, args.mbytes * 10**6, words)
