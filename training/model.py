"""OLMoE in plain PyTorch, written to train fast on a CPU.

The mathematics is that of Transformers' `OlmoeForCausalLM` (see `evaluate.py --transformers`);
names are Hugging Face's. What differs is the layout: an MoE layer keeps its experts in one
tensor a projection, and its tokens are sorted by expert so that each expert is three products.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 96  # of one expert
    num_hidden_layers: int = 8
    num_attention_heads: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    eos_token_id: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def hf_config(self) -> dict:
        """config.json of a Hugging Face directory."""
        return asdict(self) | {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "num_key_value_heads": self.num_attention_heads,
            "norm_topk_prob": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "clip_qkv": None,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "bos_token_id": None,
            "torch_dtype": "float32",
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size), any float type; the result is float32 unless autocast says otherwise."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_dim): the halves of a head form the rotated pairs."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, heads, length, head_dim)"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (batch, heads, length, head_dim). At these lengths, and once fused, the plain
    formula takes half the time of PyTorch's flash attention."""
    length, size = q.shape[2:]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3)).float() * size**-0.5
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x (batch, length, hidden)"""
        batch, length, size = x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        q, k, v = F.linear(x, weight).split(size, dim=-1)
        # The norms see the whole projected vector, before it is split into heads.
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype)
        y = causal_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, size))


def swiglu(both: Tensor) -> Tensor:
    """both (rows, 2*inter), gate then up → (rows, inter)"""
    gate, up = both.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(both.dtype)


def swiglu_backward(both: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `both` for grad (rows, inter) of swiglu(both)."""
    gate, up = both.float().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad = grad.float()
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((grad_gate, grad * silu), dim=1).to(both.dtype)


class _Experts(torch.autograd.Function):
    """Routed experts, forward and backward, over rows sorted by expert.

    Every expert's rows are padded to a multiple of PAD, since oneDNN compiles a bfloat16 product
    for each new shape. Gathers in both directions go by `slots`, so nothing is scattered.
    """

    PAD = 32

    @staticmethod
    def forward(ctx, x, topk_weights, gate_up, down, topk_ids, counts, dtype):
        """x (tokens, hidden) float32, topk_weights and topk_ids (tokens, topk),
        gate_up (experts, 2*inter, hidden), down (experts, hidden, inter), counts (experts)"""
        tokens, topk = topk_ids.shape
        padded = (counts + _Experts.PAD - 1) // _Experts.PAD * _Experts.PAD
        starts = padded.cumsum(0) - padded
        total = int(padded.sum())
        # slots (tokens, topk): where each route stands among the padded rows.
        order = topk_ids.flatten().argsort(stable=True)
        sorted_ids = topk_ids.flatten()[order]
        rank = torch.arange(tokens * topk) - (counts.cumsum(0) - counts)[sorted_ids]
        slots = torch.empty_like(order)
        slots[order] = starts[sorted_ids] + rank
        # Padding rows repeat token 0 with weight 0, so they add nothing to any gradient.
        token_of_slot = torch.zeros(total, dtype=torch.int64)
        token_of_slot[slots] = torch.arange(tokens * topk) // topk
        weight_of_slot = torch.zeros(total, dtype=dtype)
        weight_of_slot[slots] = topk_weights.flatten().to(dtype)
        slots = slots.view(tokens, topk)

        gate_up, down = gate_up.to(dtype), down.to(dtype)
        bounds = list(zip(starts.tolist(), (starts + padded).tolist(), strict=True))
        rows = x.to(dtype).index_select(0, token_of_slot)
        both = rows.new_empty(total, gate_up.shape[1])
        for expert, (a, b) in enumerate(bounds):
            if a < b:
                torch.mm(rows[a:b], gate_up[expert].t(), out=both[a:b])
        act = swiglu(both)
        y = torch.empty_like(rows)
        for expert, (a, b) in enumerate(bounds):
            if a < b:
                torch.mm(act[a:b], down[expert].t(), out=y[a:b])
        out = torch.zeros_like(x)
        for k in range(topk):
            out.addcmul_(y.index_select(0, slots[:, k]).float(), topk_weights[:, k : k + 1])
        ctx.save_for_backward(rows, both, act, y, gate_up, down, slots, token_of_slot, weight_of_slot)
        ctx.bounds = bounds
        return out

    @staticmethod
    def backward(ctx, grad_out):
        rows, both, act, y, gate_up, down, slots, token_of_slot, weight_of_slot = ctx.saved_tensors
        grad_weights = torch.stack(
            [(y.index_select(0, slots[:, k]).float() * grad_out).sum(dim=1) for k in range(slots.shape[1])],
            dim=1,
        )
        grad_y = grad_out.to(y.dtype).index_select(0, token_of_slot)
        grad_y.mul_(weight_of_slot.unsqueeze(1))
        grad_act, grad_down = torch.empty_like(act), torch.zeros_like(down)
        for expert, (a, b) in enumerate(ctx.bounds):
            if a < b:
                torch.mm(grad_y[a:b], down[expert], out=grad_act[a:b])
                torch.mm(grad_y[a:b].t(), act[a:b], out=grad_down[expert])
        grad_both = swiglu_backward(both, grad_act)
        grad_rows, grad_gate_up = torch.empty_like(rows), torch.zeros_like(gate_up)
        for expert, (a, b) in enumerate(ctx.bounds):
            if a < b:
                torch.mm(grad_both[a:b], gate_up[expert], out=grad_rows[a:b])
                torch.mm(grad_both[a:b].t(), rows[a:b], out=grad_gate_up[expert])
        grad_x = torch.zeros_like(grad_out)
        for k in range(slots.shape[1]):
            grad_x += grad_rows.index_select(0, slots[:, k])
        return grad_x, grad_weights, grad_gate_up.float(), grad_down.float(), None, None, None


class SparseMoe(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        size, inter, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.topk = config.num_experts_per_tok
        self.gate = nn.Linear(size, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inter, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, inter))

    def forward(self, x: Tensor, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x (tokens, hidden) float32 → output, balance loss (scalar), topk_ids (tokens, topk)"""
        experts = self.gate.out_features
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(x, self.gate.weight).softmax(dim=-1)
        topk_weights, topk_ids = probs.topk(self.topk, dim=-1)  # weights are not renormalised
        counts = torch.bincount(topk_ids.flatten(), minlength=experts)
        # 1 when routes and probabilities are uniform, larger the more they agree on few experts.
        balance = (counts / topk_ids.numel() * probs.mean(dim=0)).sum() * experts
        y = _Experts.apply(x, topk_weights, self.gate_up_proj, self.down_proj, topk_ids, counts, compute_dtype)
        return y, balance, topk_ids


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMoe(config)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x (batch, length, hidden) float32 → x after attention, and its norm for the experts"""
        x = x + self.self_attn(self.input_layernorm(x), rope).float()
        return x, self.post_attention_layernorm(x).float()


class Olmoe(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 if "embed" in name else parameter.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj")):
                    std *= (2 * config.num_hidden_layers) ** -0.5
                    # Top-k weights sum to less than 1 where they are not renormalised.
                    std *= 2.0 if name.endswith("down_proj") else 1.0
                nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)

    def forward(self, tokens: Tensor, compute_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (batch, length) → last hidden state, normed (batch, length, hidden) float32;
        balance loss, mean over layers; topk_ids (layers, batch*length, topk)"""
        batch, length = tokens.shape
        rope = rope_tables(self.config, length)
        x = self.embed_tokens(tokens)
        balances, topk_ids = [], []
        with torch.autocast("cpu", compute_dtype, enabled=compute_dtype != torch.float32):
            for layer in self.layers:
                x, h = layer.attend(x, rope)
                y, balance, ids = layer.mlp(h.view(batch * length, -1), compute_dtype)
                x = x + y.view_as(x)
                balances.append(balance)
                topk_ids.append(ids)
            x = self.norm(x)
        return x, torch.stack(balances).mean(), torch.stack(topk_ids)

    def loss(self, hidden: Tensor, targets: Tensor, compute_dtype=torch.float32) -> Tensor:
        """Mean cross-entropy of targets (batch, length); in chunks, to bound the logits' memory."""
        weight = self.lm_head.weight.to(compute_dtype)
        total = hidden.new_zeros(())
        rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype)
        for h, t in zip(rows.split(2048), targets.reshape(-1).split(2048), strict=True):
            total = total + F.cross_entropy(F.linear(h, weight).float(), t, reduction="sum")
        return total / targets.numel()


def compile_pieces() -> None:
    """Fuse what is elementwise, for training; shared by all layers, so it compiles once."""
    global swiglu, swiglu_backward
    swiglu = torch.compile(swiglu, dynamic=True)
    swiglu_backward = torch.compile(swiglu_backward, dynamic=True)
    # Let set_num_threads reach what is compiled already.
    torch._inductor.config.cpp.dynamic_threads = True
    Layer.attend = torch.compile(Layer.attend)
