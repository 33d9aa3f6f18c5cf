"""Plain and speculative decoding of the same prompts, and the loop's own overhead.

    python benchmarks/bench_decode.py                              # default target, a fresh draft, and a perfect one
    python benchmarks/bench_decode.py --draft runs/x/train/step_latest
    python benchmarks/bench_decode.py --toy                        # seconds, for a look at the output

Four ways side by side in one run: transformers' own `generate`, our plain loop, speculative decoding with the draft, and with
a draft that costs nothing and is always right, which bounds what any draft can gain on this machine. Then what a verify pass over
the whole block costs, in plain passes of one token: a cycle that commits fewer tokens than that loses time.
"""
import argparse, json, time
from types import SimpleNamespace

import torch

from deepspec.data.template import encode_prompts, resolve_template
from deepspec.eval.decode import DecodeConfig, block_size, generate, speculative_generate
from deepspec.eval.metrics import count_cycles
from deepspec.eval.prompt_sets import sample_prompt_sets
from deepspec.eval.schedule import profile_sps
from deepspec.io import run_record, write_json
from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import default_layer_ids, load_target, toy_target


class PerfectDraft:
    "Knows the target's answer to one prompt by heart"
    def __init__(self, tokens, num_prompt_tokens, block, layer_ids):
        self.tokens, self.first = torch.tensor([*tokens, *[0]*block]), num_prompt_tokens
        self.config = SimpleNamespace(block_size=block, target_layer_ids=list(layer_ids))

    def proposer(self, batch_size):
        self.seen = 0
        return self

    def extend(self, hidden_states, next_ids): self.seen += len(next_ids[0])

    def propose(self, anchor_B, num_tokens, temperature, generator):
        at = self.seen - self.first + 1
        return SimpleNamespace(tokens_BK=self.tokens[None, at:at + num_tokens].to(anchor_B.device), probs_BKV=None,
                               confidence_logits_BK=None)


def transformers_run(target, prompt, max_new_tokens):
    "Tokens and seconds of transformers' own greedy loop"
    started = time.perf_counter()
    out = target.model.generate(torch.tensor([prompt], device=target.device), max_new_tokens=max_new_tokens, do_sample=False,
                                pad_token_id=0, eos_token_id=None)
    return out.shape[1] - len(prompt), time.perf_counter() - started


def speed(runs):
    "Tokens a second, overhead and acceptance length of decoded prompts"
    wall_s = sum(r.wall_s for r in runs)
    counts = count_cycles(c for r in runs for g in r.generations for c in g.cycles)
    return dict(tokens_per_s=sum(r.num_tokens for r in runs)/wall_s, acceptance_length=counts.acceptance_length,
                overhead=1 - sum(r.target_s + r.draft_s for r in runs)/wall_s, draft_share=sum(r.draft_s for r in runs)/wall_s)


def bench(target, draft, prompts, config):
    "All four on the same prompts, prompt by prompt, so that a slow minute hits each of them"
    generate(target, prompts[:1], DecodeConfig(max_new_tokens=4)) # warm up
    layers, theirs, plain, fast, perfect = draft.config.target_layer_ids, [], [], [], []
    for p in prompts:
        theirs.append(transformers_run(target, p, config.max_new_tokens))
        plain.append(generate(target, [p], config))
        answer = plain[-1].generations[0].tokens
        fast.append(speculative_generate(target, draft, [p], config))
        perfect.append(speculative_generate(target, PerfectDraft(answer, len(p), block_size(draft), layers), [p], config))
        for other in (fast[-1], perfect[-1]):
            if other.generations[0].tokens != answer: raise SystemExit('a speculative answer differs from the plain one')
    tokens, seconds = map(sum, zip(*theirs))
    return {'transformers': dict(tokens_per_s=tokens/seconds), 'plain': speed(plain), 'speculative': speed(fast),
            'perfect draft': speed(perfect)}


def verify_cost(target, num_tokens):
    "Time of a pass over so many tokens of one row, in passes over one token"
    table = profile_sps(target, (1, num_tokens), row_tokens=num_tokens, repeats=15)
    return table(1)/table(num_tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--target', default='smollm2_135m')
    parser.add_argument('--draft', help='draft folder; a fresh draft if left out')
    parser.add_argument('--toy', action='store_true')
    parser.add_argument('--max-new-tokens', type=int, default=64)
    parser.add_argument('--num-prompts', type=int, default=3)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--out', help='JSON file')
    args = parser.parse_args()
    target = toy_target('llama', num_layers=6) if args.toy else load_target(args.target, args.device)
    if args.draft: draft = load_draft(args.draft, args.device)
    else:
        choices = DSparkConfig(target_layer_ids=default_layer_ids(target.num_layers, 3), mask_token_id=target.vocab_size - 1,
                               num_hidden_layers=2, markov_rank=64)
        draft = draft_from_target(target, choices).to(args.device).eval()
    talks = [[dict(role='user', content=rows[0]['turns'][0])] for rows in sample_prompt_sets().values()][:args.num_prompts]
    prompts = encode_prompts(talks, target.tokenizer, resolve_template(target.tokenizer))
    found = bench(target, draft, prompts, DecodeConfig(max_new_tokens=args.max_new_tokens, stop_ids=()))
    print(f"{'':14} {'tokens/s':>9} {'tau':>6} {'overhead':>9} {'draft':>6}")
    for name, r in found.items():
        print(f"{name:14} {r['tokens_per_s']:9.1f} {r.get('acceptance_length') or 1:6.2f} "
              + (f"{r['overhead']:9.1%} {r['draft_share']:6.1%}" if 'overhead' in r else ''))
    plain, fast, bound = (found[k]['tokens_per_s'] for k in ('plain', 'speculative', 'perfect draft'))
    print(f"speedup {fast/plain:.2f}, bound by a free and perfect draft {bound/plain:.2f}")
    verified = block_size(draft) + 1
    cost = verify_cost(target, verified)
    print(f"a verify pass over {verified} tokens costs {cost:.2f} plain passes")
    record = run_record(threads=torch.get_num_threads(), **vars(args))
    if args.out: write_json(args.out, dict(results=found, verify_cost=dict(num_tokens=verified, plain_passes=cost), run=record))
    print(json.dumps(record['host']))


if __name__ == '__main__': main()
