"The closed-form write against a token-by-token recurrence, over a grid; guards and pads"
import pytest
import torch
from torch.nn import functional as F

from deepspec.longmem.memory import (Gates, MemoryConfig, MemoryState, NeuralMemory, hidden_scale, read_memory,
                                     write_memory, write_weights)

D, HIDDEN = 6, 5


def draw(depth, momentum, N, pads, seed):
    "A random state, unit keys, values and gates in fp64"
    g = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(2, 3, *shape, generator=g, dtype=torch.float64)
    weights = [noise(D, D)*.3, None] if depth == 1 else [noise(HIDDEN, D), noise(D, HIDDEN)*.3]
    like = lambda w: torch.randn(w.shape, generator=g, dtype=torch.float64)*.2
    momenta = [None if w is None or not momentum else like(w) for w in weights]
    mask = torch.ones(2, 3, N, dtype=torch.float64)
    mask[..., pads] = 0
    unit = lambda: torch.rand(2, 3, N, generator=g, dtype=torch.float64)
    gates = Gates(unit()*mask, torch.log1p(-unit()*.3)*mask, unit().log()*mask if momentum else None, mask)
    return MemoryState(*weights, *momenta), F.normalize(noise(N, D), dim=-1), noise(N, D), gates


def slow_write(state, k, v, gates, subchunk):
    "The rule as the paper writes it, with both guards computed by a loop"
    w = {n: t.clone() for n, t in state._asdict().items() if t is not None}
    names = [n for n in ('w1', 'w2') if n in w]
    N = k.shape[-2]
    for start in range(0, N, subchunk):
        part = range(start, min(start + subchunk, N))
        frozen = [w[n].clone().requires_grad_() for n in names]
        old = MemoryState(frozen[0], frozen[1] if len(names) > 1 else None, None, None)
        theta = {i: gates.theta[..., i].clone() for i in part}
        if len(names) > 1:
            s = hidden_scale(HIDDEN)
            for i in part:
                h = s*F.silu(k[..., i:i+1, :] @ frozen[0].mT)
                theta[i] /= (h.square().sum((-2, -1)) + 1.21*s*s*frozen[1].square().sum((-2, -1))).detach().clamp(min=1)
        reach, c = {}, 0.
        for i in reversed(part):  # c_i = m_i Π(1-α) + η_{i+1} c_{i+1}
            keep = torch.stack([gates.log_keep[..., j] for j in part if j > i]).sum(0).exp() if i + 1 in part else 1.
            eta = gates.log_eta[..., i + 1].exp() if gates.log_eta is not None and i + 1 in part else 0.
            c = reach[i] = gates.mask[..., i]*keep + eta*c
        cap = sum(theta[i]*reach[i] for i in part).clamp(min=1)
        for i in part:
            error = .5*(read_memory(old, k[..., i:i+1, :]) - v[..., i:i+1, :]).square().sum()
            for n, grad in zip(names, torch.autograd.grad(error, frozen)):
                step = -(theta[i]/cap)[..., None, None]*grad
                sn = n.replace('w', 's')
                if sn in w: w[sn] = step = gates.log_eta[..., i].exp()[..., None, None]*w[sn] + step
                w[n] = gates.log_keep[..., i].exp()[..., None, None]*w[n] + gates.mask[..., i, None, None]*step
    return w


@pytest.mark.parametrize('depth', [1, 2])
@pytest.mark.parametrize('momentum', [False, True])
@pytest.mark.parametrize('N,subchunk,pads', [(1, 1, []), (12, 4, []), (13, 4, [3, 4, 12]), (9, 16, [0]),
                                             (8, 4, [4, 5, 6, 7])])
def test_closed_form_is_the_recurrence(depth, momentum, N, subchunk, pads):
    state, k, v, gates = draw(depth, momentum, N, pads, seed=N)
    fast, slow = write_memory(state, k, v, gates, subchunk), slow_write(state, k, v, gates, subchunk)
    for name, want in slow.items(): torch.testing.assert_close(getattr(fast, name), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize('depth', [1, 2])
@pytest.mark.parametrize('momentum', [False, True])
def test_pads_freeze_and_writes_split(depth, momentum):
    state, k, v, gates = draw(depth, momentum, 32, [], seed=1)
    frozen = write_memory(state, k, v, draw(depth, momentum, 32, list(range(32)), 1)[3], 16)
    for a, b in zip(frozen, state): assert (a is None and b is None) or a.equal(b)
    cut = lambda part: (k[..., part, :], v[..., part, :], Gates(*(g if g is None else g[..., part] for g in gates)))
    two = write_memory(write_memory(state, *cut(slice(0, 16)), 16), *cut(slice(16, 32)), 16)
    for a, b in zip(write_memory(state, k, v, gates, 16), two): assert (a is None and b is None) or a.equal(b)


def test_extreme_gates_stay_finite_with_finite_gradients():
    for depth, momentum in ((1, False), (1, True), (2, True)):
        torch.manual_seed(0)
        rule = MemoryConfig(num_heads=2, head_dim=4, depth=depth, momentum=momentum, hidden_dim=4, subchunk=16)
        memory = NeuralMemory(8, rule)
        for bias in (-200., 200.):
            with torch.no_grad(): memory.gates.bias.fill_(bias)
            x = torch.randn(1, 256, 8, requires_grad=True)
            state = memory.write(x, x, torch.ones(1, 256), memory.initial_state(1))
            (memory.read(x, state).sum() + sum(t.sum() for t in state if t is not None)).backward()
            assert all(t.isfinite().all() for t in state if t is not None) and x.grad.isfinite().all()


def test_weights_of_a_write_need_no_loop():
    gates = draw(1, True, 10, [2], seed=3)[3]
    w = write_weights(gates)
    c = torch.zeros(2, 3, dtype=torch.float64)
    for i in reversed(range(10)):
        eta = gates.log_eta[..., i + 1].exp() if i < 9 else 0.
        c = gates.mask[..., i]*gates.log_keep[..., i + 1:].sum(-1).exp() + eta*c
        torch.testing.assert_close(w.to_w[..., i], c)
    torch.testing.assert_close(w.momentum, gates.log_eta[..., 0].exp()*c)


def test_state_is_fp32_under_autocast():
    memory = NeuralMemory(8, MemoryConfig(num_heads=2, head_dim=4))
    x, ones = torch.randn(1, 16, 8), torch.ones(1, 16)
    with torch.autocast('cpu', dtype=torch.bfloat16): state = memory.write(x, x, ones, memory.initial_state(1))
    assert state.w1.dtype == torch.float32 and state.w1.equal(memory.write(x, x, ones, memory.initial_state(1)).w1)
