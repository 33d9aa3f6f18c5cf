"Drafts for tests: no training, rates known beforehand"
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepspec.eval.decode import DecodeConfig, generate
from deepspec.model.target import Target


def proposal(tokens_BK, probs_BKV=None, confidence_logits_BK=None):
    return SimpleNamespace(tokens_BK=tokens_BK, probs_BKV=probs_BKV, confidence_logits_BK=confidence_logits_BK)


class TableDraft:
    "Draws each token from softmax(table[previous token]); the confidence reads the previous token only"
    def __init__(self, vocab_size, block_size=3, seed=0, spread=2.):
        g = torch.Generator().manual_seed(seed)
        self.table = spread*torch.randn(vocab_size, vocab_size, generator=g)
        self.confidence = 2*torch.randn(vocab_size, generator=g)
        self.config = SimpleNamespace(block_size=block_size, target_layer_ids=[1])

    def proposer(self, batch_size): return self
    def extend(self, hidden_states, next_ids): pass

    def propose(self, anchor_B, num_tokens, temperature, generator):
        previous, tokens, probs, confidences = anchor_B, [], [], []
        for _ in range(num_tokens):
            confidences.append(self.confidence[previous])
            probs.append((self.table[previous]/(temperature or 1)).softmax(-1))
            previous = torch.multinomial(probs[-1], 1, generator=generator)[:, 0] if temperature else probs[-1].argmax(-1)
            tokens.append(previous)
        return proposal(torch.stack(tokens, 1), torch.stack(probs, 1) if temperature else None, torch.stack(confidences, 1))


class Reciter:
    "Proposes the target's own greedy continuation, each token wrong with a given probability"
    def __init__(self, target, prompts, max_new_tokens, block_size=4, error_rate=.3, seed=0, layer_ids=(1,)):
        config = DecodeConfig(max_new_tokens=max_new_tokens + block_size, stop_ids=())
        self.answers = [g.tokens for g in generate(target, prompts, config).generations]
        self.lengths, self.error_rate, self.vocab_size = [len(p) for p in prompts], error_rate, target.vocab_size
        self.rng = torch.Generator().manual_seed(seed)
        self.config = SimpleNamespace(block_size=block_size, target_layer_ids=list(layer_ids))

    def proposer(self, batch_size):
        self.seen, self.hidden = [0]*batch_size, [[] for _ in range(batch_size)]
        return self

    def extend(self, hidden_states, next_ids):
        for b, (h, ids) in enumerate(zip(hidden_states, next_ids)):
            assert len(h) == len(ids)
            self.seen[b] += len(ids)
            self.hidden[b].append(h)

    def propose(self, anchor_B, num_tokens, temperature, generator):
        rows, logits = [], []
        for b, answer in enumerate(self.answers):
            first = self.seen[b] - self.lengths[b] + 1
            row = (list(answer[first:first + num_tokens]) + [0]*num_tokens)[:num_tokens]
            wrong = torch.rand(num_tokens, generator=self.rng) < self.error_rate
            rows.append([(t + 1) % self.vocab_size if w else t for t, w in zip(row, wrong.tolist())])
            logits.append([2.]*num_tokens)
        return proposal(torch.tensor(rows), None, torch.tensor(logits))


def tiny_vocabulary_target(vocab_size=6, seed=0):
    "A target whose answers of a few tokens can be enumerated"
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for p in model.parameters():
            if p.ndim > 1: torch.nn.init.normal_(p, std=p.shape[-1]**-.5)
    return Target('tiny', model.eval().requires_grad_(False), None)
