"The chunked loss against the plain one: values, every gradient, and memory that does not grow"
from dataclasses import replace

import pytest
import torch

from deepspec.model.anchors import make_blocks
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.eagle3 import Eagle3Config
from deepspec.model.target import capture, toy_target
from deepspec.train import losses
from deepspec.train.losses import DSparkLoss, chunked_terms, dspark_loss, eagle3_loss, plain_terms


@pytest.fixture(scope='module')
def target(): return toy_target()


def toy_batch(target, rows=3, length=24, seed=0):
    "Cached-like batch with a padded last row"
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, target.vocab_size, (rows, length), generator=g)
    attention = torch.ones(rows, length, dtype=torch.uint8)
    attention[-1, length - 6:] = 0
    loss_mask = attention.clone()
    loss_mask[:, :3] = 0
    loss_mask[0, 10:13] = 0
    hidden,last = capture(target, ids, attention, (0, 1))
    return dict(input_ids=ids*attention, attention_mask=attention, loss_mask=loss_mask, target_hidden_states=hidden, target_last_hidden_states=last)


def randomise(draft):
    "A zero output matrix would hide errors in the sequential head"
    g = torch.Generator().manual_seed(7)
    for p in draft.parameters():
        if p.requires_grad and p.ndim > 1: p.data.copy_(torch.randn(p.shape, generator=g)*.3)
    return draft


def gradients(draft, total):
    named = [(n, p) for n,p in draft.named_parameters() if p.requires_grad]
    return {n: g for (n,_),g in zip(named, torch.autograd.grad(total, [p for _,p in named]))}


HEADS = [dict(markov_head_type='vanilla'), dict(markov_head_type='gated'), dict(markov_head_type='rnn'),
         dict(markov_head_type='vanilla', confidence_head_with_markov=False), dict(markov_head_type=None, enable_confidence_head=False, confidence_head_with_markov=False)]

@pytest.mark.parametrize('head', HEADS, ids=lambda h: f"{h['markov_head_type']}-{len(h)}")
@pytest.mark.parametrize('kind', ['llama', 'gemma4'])
def test_chunked_equals_plain_in_every_gradient(head, kind):
    target = toy_target(kind)
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=2, block_size=5, markov_rank=6, **head)
    draft = randomise(draft_from_target(target, choices))
    if kind == 'gemma4': draft.config.final_logit_softcapping = 5.
    batch = toy_batch(target)
    blocks = make_blocks(batch['input_ids'], batch['loss_mask'], 6, 5, 0, [0, 1, 2])
    want = dspark_loss(draft, batch, blocks, DSparkLoss(), plain_terms)
    got = dspark_loss(draft, batch, blocks, DSparkLoss(), lambda *a, **k: chunked_terms(*a, chunk=7, **k))
    torch.testing.assert_close(got.total, want.total, rtol=1e-6, atol=1e-5)
    expected = gradients(draft, want.total)
    for n,g in gradients(draft, got.total).items(): torch.testing.assert_close(g, expected[n], rtol=2e-4, atol=2e-5, msg=lambda m, n=n: f'{n}: {m}')
    for k in want.stats: torch.testing.assert_close(got.stats[k], want.stats[k], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('chunk', [1, 4, 11, 64])
@pytest.mark.parametrize('names', [('w_ce',), ('w_tv',), ('w_soft',), ('w_ce', 'w_tv', 'w_soft')])
def test_terms_alone_and_together(chunk, names):
    torch.manual_seed(0)
    h,latent,w2 = (torch.randn(*s, requires_grad=True) for s in ((11, 8), (11, 3), (50, 3)))
    head,t,labels = torch.randn(50, 8), torch.randn(7, 8), torch.randint(0, 50, (11,))
    place = torch.randint(0, 7, (11,))
    weights = {n: torch.rand(11) for n in names}
    want,got = (f(h, latent, w2, head, t, place, labels, weights, **k) for f,k in ((plain_terms, {}), (chunked_terms, dict(chunk=chunk))))
    torch.testing.assert_close(got.total, want.total)
    for a,b in zip(torch.autograd.grad(3*got.total, (h, latent, w2)), torch.autograd.grad(3*want.total, (h, latent, w2))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_closed_form_gradient_by_finite_differences():
    torch.manual_seed(1)
    h = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    head,t,labels = torch.randn(9, 5, dtype=torch.double), torch.randn(4, 5, dtype=torch.double), torch.randint(0, 9, (4,))
    weights = dict(w_ce=torch.rand(4), w_tv=torch.rand(4))
    grad, = torch.autograd.grad(chunked_terms(h, None, None, head, t, torch.arange(4), labels, weights).total, h)
    step = 1e-3
    for i in range(4):
        moved = [plain_terms(h.detach() + d*torch.eye(20, dtype=torch.double)[5*i].view(4, 5), None, None, head, t, torch.arange(4), labels, weights).total for d in (step, -step)]
        assert abs((moved[0] - moved[1]).item()/(2*step) - grad[i, 0].item()) < 1e-3


def test_logits_that_overflow_an_exponential_stay_finite():
    h = torch.full((2, 4), 50., requires_grad=True)
    head,t,labels = torch.randn(30, 4)*20, torch.randn(2, 4), torch.tensor([3, 4])
    weights = dict(w_ce=torch.ones(2), w_tv=torch.ones(2))
    want,got = (f(h, None, None, head, t, torch.arange(2), labels, weights) for f in (plain_terms, chunked_terms))
    torch.testing.assert_close(got.total, want.total)
    assert torch.autograd.grad(got.total, h)[0].isfinite().all()


def test_no_vocabulary_sized_tensor_survives_a_chunk(monkeypatch, target):
    "The largest product ever made has `chunk` rows, however many slots there are"
    seen,real = [],torch.mm
    def spy(a, b, out=None):
        r = real(a, b, out=out) if out is not None else real(a, b)
        seen.append(tuple(r.shape))
        return r
    monkeypatch.setattr(losses.torch, 'mm', spy)
    h = torch.randn(100, 8, requires_grad=True)
    weights = dict(w_ce=torch.ones(100), w_tv=torch.ones(100))
    chunked_terms(h, None, None, torch.randn(64, 8), torch.randn(100, 8), torch.arange(100), torch.randint(0, 64, (100,)), weights, chunk=16).total.backward()
    assert max(r for r,c in seen if c == 64) == 16


def test_a_row_of_the_target_is_computed_once_a_part(monkeypatch):
    "Forty slots of eight rows: no product of the target has more than eight"
    seen,real = [],torch.mm
    def spy(a, b, out=None):
        seen.append(len(a))
        return real(a, b, out=out)
    monkeypatch.setattr(losses.torch, 'mm', spy)
    h,place = torch.randn(40, 8, requires_grad=True), torch.arange(40) % 8
    weights = dict(w_ce=torch.ones(40))
    chunked_terms(h, None, None, torch.randn(64, 8), torch.randn(8, 8), place, torch.randint(0, 64, (40,)), weights)
    assert sorted(seen) == [8, 40, 40]  # the target's, the draft's, and the draft's gradient


def test_summing_first_makes_the_loss_independent_of_the_deal(target):
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=4)
    draft,batch = randomise(draft_from_target(target, choices)), toy_batch(target)
    whole = dspark_loss(draft, batch, make_blocks(batch['input_ids'], batch['loss_mask'], 5, 4, 3, [7, 8, 9]), DSparkLoss())
    parts = [dspark_loss(draft, {k: v[i:i+1] for k,v in batch.items()}, make_blocks(batch['input_ids'][i:i+1], batch['loss_mask'][i:i+1], 5, 4, 3, [7 + i]), DSparkLoss())
             for i in range(3)]
    torch.testing.assert_close(sum(p.total for p in parts), whole.total)
    torch.testing.assert_close(sum(p.weight for p in parts), whole.weight)


@pytest.mark.parametrize('detach', [False, True])
def test_the_confidence_loss_reaches_the_draft_only_as_decided(target, detach):
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=4)
    draft,batch = randomise(draft_from_target(target, choices)), toy_batch(target)
    blocks = make_blocks(batch['input_ids'], batch['loss_mask'], 5, 4, 0, [0, 1, 2])
    grads = {a: gradients(draft, dspark_loss(draft, batch, blocks, DSparkLoss(confidence_head_alpha=a, detach_confidence=detach)).total) for a in (0., 5.)}
    same = {n: torch.equal(grads[0.][n], grads[5.][n]) for n in grads[0.]}
    assert not same['confidence_head.proj.weight']
    backbone = [n for n in same if not n.startswith('confidence_head')]
    if detach: assert all(same[n] for n in backbone)
    else: assert not same['fc.weight'] and not same['markov_head.markov_w1.weight']


def test_the_acceptance_rate_is_a_constant_for_the_confidence_head(target):
    "c* carries no gradient: with only the confidence loss on, lm_head's distribution gets none through it"
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=4)
    draft,batch = randomise(draft_from_target(target, choices)), toy_batch(target)
    blocks = make_blocks(batch['input_ids'], batch['loss_mask'], 5, 4, 0, [0, 1, 2])
    only = DSparkLoss(ce_loss_alpha=0., l1_loss_alpha=0.)
    assert not gradients(draft, dspark_loss(draft, batch, blocks, only).total)['markov_head.markov_w2.weight'].any()


def test_metrics_have_the_values_of_their_definitions(target):
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=3, markov_rank=4)
    draft,batch = randomise(draft_from_target(target, choices)), toy_batch(target)
    blocks = make_blocks(batch['input_ids'], batch['loss_mask'], 9, 3, 0, [0, 1, 2])
    stats = losses.readable_stats(dspark_loss(draft, batch, blocks, DSparkLoss()).stats)
    with torch.no_grad():
        h = draft(batch['target_hidden_states'], blocks)
        logits = draft.lm_head(h) + draft.markov_head.markov_w2(draft.markov_head.latents(h, blocks.prev_NK))
        p = torch.softmax(logits, -1)
        q = torch.softmax(draft.lm_head(batch['target_last_hidden_states'][blocks.rows_N[:, None], blocks.positions_NK.clamp(max=23)]), -1)
    accept = (1 - (p - q).abs().sum(-1)/2)*blocks.supervised_NK
    assert stats['tau_probabilistic'] == pytest.approx((1 + accept[:, 0] + accept[:, 0]*accept[:, 1] + accept.prod(1))[blocks.supervised_NK[:, 0]].mean().item(), abs=1e-5)
    assert stats['acceptance_rate'][1] == pytest.approx((accept[:, 1].sum()/blocks.supervised_NK[:, 1].sum()).item(), abs=1e-5)


@pytest.mark.parametrize('kind', ['qwen3', 'gemma4'])
def test_eagle3_chunked_equals_plain(kind):
    target = toy_target(kind)
    draft = randomise(draft_from_target(target, Eagle3Config(target_layer_ids=(0, 1), ttt_length=3)))
    batch = toy_batch(target)
    want,got = eagle3_loss(draft, batch, plain_terms), eagle3_loss(draft, batch)
    torch.testing.assert_close(got.total, want.total)
    expected = gradients(draft, want.total)
    for n,g in gradients(draft, got.total).items(): torch.testing.assert_close(g, expected[n], rtol=2e-4, atol=2e-5)


def test_eagle3_mask_moves_with_its_targets(target):
    "Only the labels of supervised positions count: change one, and the loss follows its own mask"
    draft = randomise(draft_from_target(target, Eagle3Config(target_layer_ids=(0, 1), ttt_length=2)))
    batch = toy_batch(target, rows=1)
    batch['loss_mask'] = torch.zeros_like(batch['loss_mask'])
    batch['loss_mask'][0, 9] = 1
    base = eagle3_loss(draft, batch)
    assert base.stats['slots'].tolist() == [1., 1.] # token 9 is predicted by position 7 at step 0 and by 6 at step 1
    moved = dict(batch, target_last_hidden_states=batch['target_last_hidden_states'].clone())
    moved['target_last_hidden_states'][0, 8] += 1 # the target predicts token 9 at position 8
    assert eagle3_loss(draft, moved).total != base.total
    other = dict(batch, target_last_hidden_states=batch['target_last_hidden_states'].clone())
    other['target_last_hidden_states'][0, [7, 9, 10]] += 1
    assert torch.equal(eagle3_loss(draft, other).total, base.total)


def test_slot_weights_and_bad_values():
    assert DSparkLoss().slot_weights(3).tolist() == pytest.approx([1, 2.718281828**-.25, 2.718281828**-.5])
    with pytest.raises(ValueError, match='loss_decay_gamma=0'): replace(DSparkLoss(), loss_decay_gamma=0)
