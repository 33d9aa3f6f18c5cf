"""What every rank of test_titans_ranks.py runs: one window, gradients and losses written by rank 0"""
import sys

import torch

from deepspec.longmem.babilong import collate_babilong
from deepspec.longmem.model import QwenTitansForBABILong, tiny_qwen
from deepspec.longmem.memory import MemoryConfig
from deepspec.longmem.train import accumulate_window, apply_gradients, evaluate_babilong, joined_ranks, wrap_model
from deepspec.longmem.train import stage_dataset, stages, TrainingConfig, Ranks
from deepspec.longmem.tasks import tiny_tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

CHUNK,LENGTH = 16,64


def sample(answer_at: int, num_labels: int, seed: int) -> dict:
    "Random tokens with labels that begin at `answer_at`, padded behind them"
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (LENGTH,), generator=g)
    labels, mask = torch.full((LENGTH,), -100), (torch.arange(LENGTH) < answer_at + num_labels).long()
    labels[answer_at:answer_at + num_labels] = ids[answer_at:answer_at + num_labels]
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def window(rank: int, world: int) -> list:
    "Micro-batches of a rank; answers lie in the first, a middle, the last chunk, at a border, or nowhere"
    places = [(5, 1), (62, 2), (16, 3), (40, 1), (20, 0), (33, 4)]
    mine = [sample(at, n, i) for i, (at, n) in enumerate(places)][rank::world]
    return [collate_babilong([s]) for s in mine]


def make_model(frozen: bool, **memory) -> QwenTitansForBABILong:
    "The same small model on every rank"
    torch.manual_seed(0)
    rule = MemoryConfig(num_heads=2, head_dim=8, hidden_dim=8, subchunk=4, **memory)
    qwen = tiny_qwen(vocab_size=512, hidden_size=16)
    model = QwenTitansForBABILong(qwen, (0,), rule, from_scratch=True, chunk_size=CHUNK)
    if frozen:
        for n, p in model.named_parameters(): p.requires_grad_('memory' in n)
    return model


def run(out: str, how: str, frozen: bool, depth: int):
    "One window: mean loss, gradients, and the weights after a step"
    with joined_ranks() as ranks: measured(ranks, out, how, frozen, depth)


def measured(ranks, out: str, how: str, frozen: bool, depth: int):
    "What `run` does once the ranks have met; its DDP model is gone before the process group is"
    model = wrap_model(make_model(frozen, depth=depth, momentum=depth == 2), ranks, how == 'fsdp')
    loss, count = accumulate_window(model, window(ranks.rank, ranks.world_size), ranks)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = lambda g: (g.full_tensor() if hasattr(g, 'full_tensor') else g).clone()
    grads = {n.removeprefix('module.'): whole(g) for n, g in grads.items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=.1)
    norm = apply_gradients(model, optimizer, 1.)
    after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    config = TrainingConfig(data_path='generate:qa1', max_length=96, answer_reserve_tokens=4, max_samples=5)
    ds = stage_dataset(config, stages(config)[0], tiny_tokenizer(), Ranks())
    small = [{k: v.clamp(max=511) if k == 'input_ids' else v for k, v in ds[i].items()} for i in range(5)]
    found = evaluate_babilong(model, Rows(small, ds), tiny_tokenizer(), ranks=ranks)
    if ranks.rank == 0:
        torch.save(dict(loss=loss, count=count, norm=norm, grads=grads, after=after, found=found), out)


class Rows:
    "Five samples with the rows behind them"
    def __init__(self, samples, dataset): self.samples, self.rows = samples, dataset.rows
    def __len__(self): return len(self.samples)
    def __getitem__(self, i): return self.samples[i]


if __name__ == '__main__': run(sys.argv[1], sys.argv[2], sys.argv[3] == 'frozen', int(sys.argv[4]))
