"""Random models as text: blocks on a stream [batch, positions, 8], their rules, and what goes around them."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from programs.operations import ANY, ORDINARY, POSITIONS, SIZES

WIDTH = 8
HOW = "HOW"  # the number, in what a block passes


class Draw(Random):
    """Random choices."""

    def chance(self, share: float) -> bool:
        """True in that share of cases."""
        return self.random() < share

    def some(self, values: Sequence[Any], least: int, most: int) -> list[Any]:
        """From `least` to `most` of these, with repetitions."""
        return [self.choice(values) for _ in range(self.randint(least, most))]


@dataclass
class Block:
    """A module: lines of its `__init__`, of its forward from `x` to `x`, and rules by names within it."""

    init: list[str]
    forward: list[str]
    rules: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    pad: dict[str, int] = field(default_factory=dict)
    acts: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)  # text in front of the class
    arguments: str = ""  # of its forward, beside x
    passes: str = ""  # how the model calls it
    one_data_rank: bool = False  # its backward depends on the scale of the loss

    def text(self, name: str) -> str:
        """The class."""
        body = [line for statement in self.forward for line in statement.splitlines()]
        return "\n".join(
            [
                *self.before,
                f"class {name}(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.init),
                f"    def forward(self, x{self.arguments}):",
                *(f"        {line}" for line in body),
                "        return x",
            ]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def mlp(draw: Draw, operations: Sequence[str] = (), features: int = 16) -> Block:
    """Column-parallel, operations, row-parallel."""
    bias, out = draw.chance(0.7), draw.chance(0.5)
    statements = list(operations) or draw.some(ORDINARY, 1, 2)
    enter = draw.choice(["h = self.up(x)", "h = self.up(self.norm(x))", "h = self.up(x) * self.gate(x).sigmoid()"])
    leave = draw.choice(["x = x + self.down(h)", "x = self.down(h)", "x = self.scale * self.down(h) + x"])
    init = [
        f"self.up = nn.Linear({WIDTH}, {features}, bias={bias})",
        f"self.down = nn.Linear({features}, {WIDTH}, bias={out})",
    ]
    rules = {"up.weight": "ff@tp c@fsdp", "down.weight": "c@fsdp ff@tp"}
    if "norm" in enter:
        init.append(f"self.norm = nn.{draw.choice(['LayerNorm', 'RMSNorm'])}({WIDTH})")
    if "gate" in enter:
        init.append(f"self.gate = nn.Linear({WIDTH}, {features})")
        rules["gate.weight"] = "ff@tp c@fsdp"
    if "scale" in leave:
        init.append(f"self.scale = nn.Parameter(torch.full([{draw.choice(['', '1', str(WIDTH)])}], 0.7))")
    return Block(init, [enter, *statements, leave], rules, {"ff": features} if draw.chance(0.2) else {})


def mixed_mlp(draw: Draw) -> Block:
    """With operations that may not be right on parts."""
    statements = draw.some(ANY, 1, 2) + draw.some(ORDINARY, 0, 1)
    draw.shuffle(statements)
    return mlp(draw, statements)


def mlp_of_sizes(draw: Draw) -> Block:
    """With what is made of the number of features, of which a rank has a part."""
    statements = draw.some(SIZES, 1, 2) + draw.some(ORDINARY, 0, 1)
    draw.shuffle(statements)
    return mlp(draw, statements)


def attention(draw: Draw) -> Block:
    """Heads from the tensors; grouped queries, norms of queries, padding, masks."""
    heads, size = draw.choice([4, 4, 2, 8]), draw.choice([2, 4])
    kv = draw.choice([heads, heads, heads // 2])
    pads = draw.chance(0.35)
    if pads:
        heads = kv = draw.choice([3, 5, 3])
    q, k = heads * size, kv * size
    init = [
        f"self.q, self.k = nn.Linear({WIDTH}, {q}), nn.Linear({WIDTH}, {k})",
        f"self.v, self.o = nn.Linear({WIDTH}, {k}), nn.Linear({q}, {WIDTH}, bias={draw.chance(0.5)})",
    ]
    if pads or draw.chance(0.3):
        init[0] = f"self.q, self.k = nn.Linear({WIDTH}, {q}, bias=False), nn.Linear({WIDTH}, {k}, bias=False)"
    name = "kv" if kv != heads else "heads"
    kv_rule = f"({name}@tp{'?' if kv != heads else ''} d) c@fsdp"
    rules = {
        "q.weight": "(heads@tp d) c@fsdp",
        "k.weight": kv_rule,
        "v.weight": kv_rule,
        "o.weight": "c@fsdp (heads@tp d)",
    }
    lines = [f"q, k, v = (w(x).unflatten(-1, (-1, {size})).transpose(1, 2) for w in (self.q, self.k, self.v))"]
    norm = draw.choice(["", "", "root", "normalize", "rms", "module", "learnt"])
    if norm == "root":
        lines.append("q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))")
    elif norm == "normalize":
        lines.append("q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)")
    elif norm == "rms":
        lines.append("q, k = (t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))")
    elif norm == "module":
        init.append(f"self.qn, self.kn = nn.RMSNorm({size}), nn.LayerNorm({size})")
        lines.append("q, k = self.qn(q), self.kn(k)")
    elif norm == "learnt":
        init.append(f"self.gain = nn.Parameter(torch.ones({size}))")
        lines.append("q = self.gain * q / q.square().sum(-1, keepdim=True).sqrt()")
    if kv != heads:
        lines.append(draw.choice(["r = q.shape[1] // k.shape[1]", f"r = {heads // kv}"]))
        lines.append("k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)")
    if draw.chance(0.5):
        causal = draw.choice(["True", "False"])
        lines.append(f"out = F.scaled_dot_product_attention(q, k, v, is_causal={causal})")
    else:
        lines.append(f"scores = q @ k.transpose(-1, -2) / {size}**0.5")
        if draw.chance(0.5):
            lines.append("mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)")
            lines.append("scores = scores.masked_fill(mask, float('-inf'))")
        lines.append(draw.choice(["out = scores.softmax(-1) @ v", "out = torch.einsum('bhij,bhjd->bhid', scores, v)"]))
    if draw.chance(0.2):
        lines.append(
            draw.choice(["out = out * torch.sigmoid(out)", "out = out.flip(1)", "out = out - out.mean(1, True)"])
        )
    lines.append(f"x = x + self.o(out.transpose(1, 2).{draw.choice(['flatten(2)', 'reshape(*x.shape[:2], -1)'])})")
    # 4 divides nothing here that pad would not make whole.
    return Block(init, lines, rules, {"d": size}, {"heads": 4} if pads else {})


def fused_attention(draw: Draw) -> Block:
    """Queries, keys and values in one weight."""
    heads, size = 4, draw.choice([2, 4])
    width = heads * size
    init = [f"self.qkv, self.o = nn.Linear({WIDTH}, {3 * width}), nn.Linear({width}, {WIDTH})"]
    split = draw.choice(
        ["q, k, v = self.qkv(x).chunk(3, -1)", "q, k, v = self.qkv(x).unflatten(-1, (3, -1)).unbind(-2)"]
    )
    lines = [
        split,
        f"q, k, v = (t.unflatten(-1, (-1, {size})).transpose(1, 2) for t in (q, k, v))",
        "x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))",
    ]
    rules = {"qkv.weight": "(3 heads@tp d) c@fsdp", "o.weight": "c@fsdp (heads@tp d)"}
    return Block(init, lines, rules, {"d": size})


def own_parameters(draw: Draw) -> Block:
    """Parameters of its own, in einsum, `@`, `F.linear`, lists and dictionaries."""
    kind = draw.choice(["einsum", "matmul", "linear", "list", "dict", "heads", "beside", "scale"])
    make = "nn.Parameter(torch.randn([{}]) * 0.3)".format
    up = {"a": "c@fsdp ff@tp", "b": "ff@tp c@fsdp"}
    operation = draw.choice(["torch.tanh(h)", "F.gelu(h)", "h * h", "h - 1", "F.relu(h)"])
    if kind == "einsum":
        init = [f"self.a, self.b = {make(f'{WIDTH}, 16')}, {make(f'16, {WIDTH}')}"]
        lines = [
            "h = torch.einsum('bsc,cf->bsf', x, self.a)",
            f"h = {operation}",
            "x = torch.einsum('bsf,fc->bsc', h, self.b)",
        ]
    elif kind == "matmul":
        init = [f"self.a, self.b = {make(f'{WIDTH}, 16')}, {make(f'16, {WIDTH}')}"]
        lines = ["h = x @ self.a", f"h = {operation}", draw.choice(["x = h @ self.b", "x = (self.b.T @ h.mT).mT"])]
    elif kind == "linear":
        init = [f"self.a, self.b = {make(f'16, {WIDTH}')}, {make(f'{WIDTH}, 16')}", f"self.c = {make('16')}"]
        lines = ["h = F.linear(x, self.a, self.c)", f"h = {operation}", "x = F.linear(h, self.b)"]
        up = {"a": "ff@tp c@fsdp", "b": "c@fsdp ff@tp", "c": "ff@tp"}
    elif kind == "list":
        init = [f"self.w = nn.ParameterList([{make(f'{WIDTH}, 16')}, {make(f'16, {WIDTH}')}])"]
        lines = ["h = x @ self.w[0]", f"h = {operation}", "x = h @ self.w[1]"]
        up = {"w.0": "c@fsdp ff@tp", "w.1": "ff@tp c@fsdp"}
    elif kind == "dict":
        init = [f"self.w = nn.ParameterDict({{'a': {make(f'{WIDTH}, 16')}, 'b': {make(f'16, {WIDTH}')}}})"]
        lines = ["h = x @ self.w['a']", f"h = {operation}", "x = h @ self.w['b']"]
        up = {"w.a": "c@fsdp ff@tp", "w.b": "ff@tp c@fsdp"}
    elif kind == "heads":
        init = [
            f"self.q, self.k, self.v = ({make(f'{WIDTH}, 4, 2')} for _ in range(3))",
            f"self.o = {make(f'4, 2, {WIDTH}')}",
        ]
        lines = [
            "q, k, v = (torch.einsum('bsc,chd->bhsd', x, w) for w in (self.q, self.k, self.v))",
            "out = torch.einsum('bhid,bhjd->bhij', q, k).softmax(-1)",
            "x = torch.einsum('bhij,bhjd,hdc->bic', out, v, self.o)",
        ]
        up = {"{q,k,v}": "c@fsdp heads@tp d", "o": "heads@tp d c@fsdp"}
    elif kind == "beside":
        init = [f"self.up, self.b = nn.Linear({WIDTH}, 16), {make(f'16, {WIDTH}')}"]
        lines = ["h = self.up(x)", f"h = {operation}", "x = h @ self.b"]
        up = {"up.weight": "ff@tp c@fsdp", "b": "ff@tp c@fsdp"}
    else:
        init = [f"self.a, self.b = {make(f'{WIDTH}')}, {make('')}"]
        lines = ["x = x * (1 + self.a) + self.b"]
        up = {}
    return Block(init, lines, up)


def whole_layer(draw: Draw) -> Block:
    """A layer of torch that no compute axis splits."""
    layer, line = draw.choice(
        [
            (f"nn.LayerNorm({WIDTH})", "x = self.m(x)"),
            (f"nn.RMSNorm({WIDTH})", "x = x + self.m(x)"),
            (f"nn.Linear({WIDTH}, {WIDTH})", "x = x + torch.tanh(self.m(x))"),
            (f"nn.Conv1d({WIDTH}, {WIDTH}, 3, padding=1)", "x = x + self.m(x.mT).mT"),
            (f"nn.GRU({WIDTH}, {WIDTH}, batch_first=True)", "x = self.m(x)[0]"),
            (f"nn.LSTM({WIDTH}, {WIDTH}, batch_first=True)", "x = x + self.m(x)[0]"),
            (f"nn.Bilinear({WIDTH}, {WIDTH}, {WIDTH})", "x = self.m(x, x)"),
            (f"nn.PReLU({WIDTH})", "x = self.m(x.mT).mT"),
            (f"nn.GroupNorm(2, {WIDTH})", "x = self.m(x.mT).mT"),
            (f"nn.MultiheadAttention({WIDTH}, 2, batch_first=True)", "x = x + self.m(x, x, x, need_weights=False)[0]"),
            (f"nn.TransformerEncoderLayer({WIDTH}, 2, 16, 0.0, batch_first=True)", "x = self.m(x)"),
            (f"nn.Sequential(nn.Linear({WIDTH}, 12), nn.Tanh(), nn.Linear(12, {WIDTH}))", "x = x + self.m(x)"),
            ("nn.Identity()", "x = self.m(x)"),
        ]
    )
    return Block([f"self.m = {layer}"], [line])


def split_layer(draw: Draw) -> Block:
    """A layer of torch that a compute axis splits."""
    kind = draw.choice(["conv", "mha", "encoder", "group norm", "instance norm", "conv groups"])
    if kind == "mha":
        rules = {"m.in_proj_weight": "(3 heads@tp d) c@fsdp", "m.out_proj.weight": "c@fsdp (heads@tp d)"}
        init = [f"self.m = nn.MultiheadAttention({WIDTH}, 4, batch_first=True)"]
        return Block(init, ["x = x + self.m(x, x, x, need_weights=False)[0]"], rules, {"d": WIDTH // 4})
    if kind == "encoder":
        rules = {
            "m.self_attn.in_proj_weight": "(3 heads@tp d) c@fsdp",
            "m.self_attn.out_proj.weight": "c@fsdp (heads@tp d)",
            "m.linear1.weight": "ff@tp c@fsdp",
            "m.linear2.weight": "c@fsdp ff@tp",
        }
        first = draw.chance(0.5)
        init = [f"self.m = nn.TransformerEncoderLayer({WIDTH}, 4, 16, 0.0, batch_first=True, norm_first={first})"]
        return Block(init, ["x = self.m(x)"], rules, {"d": WIDTH // 4})
    init = [f"self.a, self.b = nn.Conv1d({WIDTH}, 16, 3, padding=1), nn.Conv1d(16, {WIDTH}, 1)"]
    rules = {"a.weight": "ch@tp c@fsdp _", "b.weight": "c@fsdp ch@tp _"}
    lines = [
        "h = self.a(x.mT)",
        draw.choice(["h = F.gelu(h)", "h = torch.tanh(h)", "h = h.softmax(-1)"]),
        "x = x + self.b(h).mT",
    ]
    if kind == "group norm":
        init.append("self.n = nn.GroupNorm(8, 16)")
        rules["n.*"] = "ch@tp"
        lines[1] = "h = F.relu(self.n(h))"
    elif kind == "instance norm":
        init.append("self.n = nn.InstanceNorm1d(16, affine=True)")
        rules["n.{weight,bias}"] = "ch@tp"
        lines[1] = "h = self.n(h).sin()"
    elif kind == "conv groups":
        init.append("self.n = nn.Conv1d(16, 16, 3, padding=1, groups=8)")
        rules["n.weight"] = "ch@tp _ _"
        lines[1] = "h = F.relu(self.n(h))"
    return Block(init, lines, rules)


def registered(draw: Draw) -> Block:
    """A parallel forward by hand."""
    init = ["self.m = OWN()"]
    before = [
        "class OWN(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.a, self.b = nn.Parameter(torch.randn(16, {WIDTH}) * 0.3), "
        f"nn.Parameter(torch.randn({WIDTH}, 16) * 0.3)",
        "    def forward(self, x):",
        "        return torch.tanh(x @ self.a.T) @ self.b.T",
        "@sf.register(OWN)",
        "def own(module, local, layouts, x):",
        "    x = sf.collectives.pvary(x, layouts.mesh, 'tp')",
        "    return sf.collectives.psum(torch.tanh(x @ local['a'].T) @ local['b'].T, layouts.mesh, 'tp')",
    ]
    rules = {"m.a": "ff@tp c@fsdp", "m.b": "c@fsdp ff@tp"}
    return Block(init, [draw.choice(["x = x + self.m(x)", "x = self.m(x)"])], rules, before=before)


def only_backward(draw: Draw) -> Block:
    """What changes gradients on their way: an `autograd.Function`, or a hook."""
    rule, scaled = draw.choice(
        [("g.clamp(-1e-4, 1e-4)", True), ("g.sign() * 1e-3", True), ("-g", False), ("(1000 * g).tanh()", True)]
    )
    forward = draw.choice(["x.clone()", "x * 1.0", "x.round() * 0.1 + x", "x.view_as(x)"])
    before = [
        "class BACK(torch.autograd.Function):",
        "    @staticmethod",
        "    def forward(ctx, x):",
        f"        return {forward}",
        "    @staticmethod",
        "    def backward(ctx, g):",
        f"        return {rule}",
    ]
    hook = "h.register_hook(lambda g: " + rule + ") if h.requires_grad else None"
    init = [f"self.up, self.down, self.o = nn.Linear({WIDTH}, 16), nn.Linear(16, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})"]
    rules = {"up.weight": "ff@tp c@fsdp", "down.weight": "c@fsdp ff@tp"}
    meeting = draw.choice(
        [
            "self.up(x) * g[..., :1]",
            "self.up(x) + g.mean(-1, keepdim=True)",
            "torch.where(g[..., :1] > 0, self.up(x), g[..., 1:2])",
        ]
    )
    where = draw.choice(["before", "meets", "meets", "split", "after", "stream", "hook", "hook meets"])
    inner = {
        "before": ["x = BACK.apply(self.o(x))", "x = self.down(torch.tanh(self.up(x)))"],
        "split": ["x = x + self.down(BACK.apply(self.up(x)))"],
        "after": ["x = BACK.apply(self.down(torch.tanh(self.up(x))))"],
        "stream": ["x = BACK.apply(x) + self.down(torch.tanh(self.up(x)))"],
        "meets": ["g = BACK.apply(self.o(x))", f"x = x + self.down({meeting})"],
        "hook meets": ["h = torch.tanh(self.o(x))", hook, f"x = x + self.down({meeting.replace('g', 'h')})"],
        "hook": ["h = torch.tanh(self.o(x))", hook, "x = h.sin() + self.down(self.up(h).sin())"],
    }[where]
    return Block(init, inner, rules, before=before if "hook" not in where else [], one_data_rank=scaled)


def by_size(draw: Draw) -> Block:
    """Ways that the sizes of its input choose, or reshapes that they decide."""
    statement = draw.choice(
        [
            "h = h.transpose(1, 2).reshape(h.shape)",
            "h = h.cumsum(-1) if h.shape[1] > 2 else h",
            "h = h if h.shape[1] == 1 else h.flip(-1)",
            "h = h.view(h.shape[0], -1).roll(1, -1).view(h.shape)",
            "h = h.softmax(-1) if x.shape[1] > 2 else h.tanh()",
            "h = h.reshape(h.shape[0], -1, h.shape[1]).mT.reshape(h.shape)",
            "h = h.sin() if h.shape[1] > 2 else h",
            "h = h[:, : max(1, h.shape[1] // 2)].repeat(1, 4, 1)[:, : h.shape[1]]",
            *POSITIONS,
        ]
    )
    return mlp(draw, [statement])


def by_argument(draw: Draw) -> Block:
    """Ways that numbers, words, lists, dictionaries or attributes choose; the argument is `how`."""
    odd = draw.choice(
        ["h.flip(-1)", "h.cumsum(-1)", "h.softmax(-1)", "h - h.mean(-1, keepdim=True)", "h.sin()", "2 * h"]
    )
    value, passes = draw.choice(
        [("how", HOW), ("how['value']", f"{{'value': {HOW}}}"), ("how[0]", f"[{HOW}]"), ("self.how", "")]
    )
    test = draw.choice(["{} > 0.5", "{} > 0.5", "int({} * 100) > 50", "{} == 0.75", "not {} < 0.5"]).format(value)
    statement = draw.choice([f"h = {odd} if {test} else h", f"h = {odd} if {test} else h", f"h = h * {value}"])
    block = mlp(draw, [statement])
    block.init.append("self.how = 0.25")
    if passes:
        block.arguments, block.passes = ", how", f", {passes}"
    return block


def with_state(draw: Draw) -> Block:
    """What a forward keeps: buffers, counters, lists, caches in its arguments; the argument is `seen`."""
    kind = draw.choice(["buffer", "count", "seen", "seen", "table", "schedule"])
    if kind == "buffer":
        init, lines = (
            [f"self.register_buffer('mean', torch.zeros({WIDTH}))"],
            ["self.mean = 0.9 * self.mean + 0.1 * self.w.detach()", "x = x * (1 + self.mean) + self.w"],
        )
        return Block([*init, f"self.w = nn.Parameter(torch.randn({WIDTH}))"], lines)
    if kind == "count":
        block = mlp(draw)
        block.init.append("self.calls = 0")
        block.forward[0:0] = ["self.calls += 1", draw.choice(["x = x * self.calls", "x = x / (1 + self.calls)"])]
        return block
    if kind == "schedule":
        block = mlp(draw)
        calls, kind = draw.choice(
            [
                ("0", "self.calls"),
                ("torch.tensor(0)", "self.calls"),
                ("torch.tensor(0)", "self.calls.item()"),
                ("torch.zeros(2)", "self.calls.sum() / 2"),
            ]
        )
        added = draw.choice(["self.calls += 1", "self.calls = self.calls + 1"])
        block.init.append(f"self.calls = {calls}")
        odd = draw.choice(["h.flip(-1)", "h.cumsum(-1)", "h.sin()", "h * (1 + h.sum(-1, keepdim=True))"])
        block.forward[1:1] = [f"h = {odd} if {kind} > 1 else h", added]
        return block
    block = mlp(draw)
    block.arguments, block.passes = ", seen", ", seen"
    line = "seen.append(x)" if kind == "seen" else "seen.append({'x': x, 'n': len(seen)})"
    block.forward.append(line)
    return block


def cached(draw: Draw) -> Block:
    """Attention that keeps keys and values in a dictionary that it is given, as `seen`."""
    init = [f"self.q, self.k, self.v, self.o = (nn.Linear({WIDTH}, {WIDTH}) for _ in range(4))"]
    add = draw.choice(
        [
            "k, v = (torch.cat([seen[n], t], 2) if n in seen else t for n, t in (('k', k), ('v', v)))",
            "k = torch.cat([seen['k'], k], 2) if seen else k; v = torch.cat([seen['v'], v], 2) if seen else v",
        ]
    )
    lines = [
        "q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))",
        *add.split("; "),
        "seen['k'], seen['v'] = k, v",
        "x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))",
    ]
    rules = {"{q,k,v}.weight": "(heads@tp d) c@fsdp", "o.weight": "c@fsdp (heads@tp d)"}
    return Block(init, lines, rules, {"d": 2}, arguments=", seen", passes=", seen")


def joined(draw: Draw) -> Block:
    """What a module of one's own, a convolution or a norm leaves split, and something that may need it whole."""
    own = draw.chance(0.5)
    make = f"nn.Parameter(torch.randn({WIDTH}, 16) * 0.3)"
    made = draw.choice(["torch.tanh(x @ self.a) + self.b", "x @ self.a * self.b", "F.linear(x, self.a.T)"])
    before = [
        "class OWN(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.a, self.b = {make}, nn.Parameter(torch.randn(16))",
        "    def forward(self, x):",
        f"        return {made}",
    ]
    rules = {"m.a": "c@fsdp ff@tp", "m.b": "ff@tp"} if own else {"m.weight": "ch@tp c@fsdp _"}
    init = ["self.m = OWN()" if own else f"self.m = nn.Conv1d({WIDTH}, 16, 3, padding=1)"]
    init.append(f"self.o = nn.Linear(16, {WIDTH})")
    acts = {"m": draw.choice(["... _", "... f", "b s f"]) if own else draw.choice(["b _ ...", "b ch s", "... ch s"])}
    lines = ["h = self.m(x)" if own else "h = self.m(x.mT)"]
    if not own and draw.chance(0.4):
        init.append(f"self.n = {draw.choice(['nn.GroupNorm(8, 16)', 'nn.InstanceNorm1d(16, affine=True)'])}")
        lines.append("h = self.n(h)")
        rules["n.{weight,bias}"] = "ch@tp"
        acts |= {"n": "b _ ..."} if draw.chance(0.8) else {}
    lines += [] if own else ["h = h.mT"]
    mixes = ["h.softmax(-1)", "h.cumsum(-1)", "h - h.mean(-1, keepdim=True)", "h.flip(-1)", "h.roll(1, -1)", "h.sin()"]
    lines.append(f"h = {draw.choice([*mixes, 'h / (1 + h.norm(dim=-1, keepdim=True))', 'h.flatten(1).view_as(h)'])}")
    if draw.chance(0.3):
        rules["o.weight"] = "c@fsdp gg@tp"
    lines.append("x = x + self.o(h)")
    return Block(init, lines, rules, acts=acts if draw.chance(0.8) else {}, before=before if own else [])


KINDS: dict[str, Callable[[Draw], Block]] = {
    "joined": joined,
    "cached": cached,
    "mlp": mlp,
    "mixed mlp": mixed_mlp,
    "mlp of sizes": mlp_of_sizes,
    "attention": attention,
    "fused attention": fused_attention,
    "own parameters": own_parameters,
    "whole layer": whole_layer,
    "split layer": split_layer,
    "registered": registered,
    "only backward": only_backward,
    "by size": by_size,
    "by argument": by_argument,
    "with state": with_state,
}


# ---------------------------------------------------------------------------------------------------------------------
# Models


@dataclass
class Model:
    """The text of a model `Model()` and of its policy `policy`."""

    text: str
    fields: dict[str, str]  # of the policy, as text
    tokens: bool  # whether it takes ids instead of features
    passes: str
    out: int
    one_data_rank: bool
    blocks: int
    method: str  # instead of forward

    def policy(self, *others: str) -> str:
        """A call that makes the policy."""
        return f"sf.Policy({', '.join([f'{name}={value}' for name, value in self.fields.items()] + list(others))})"


def model(draw: Draw, kinds: Sequence[str], *, most: int = 3, options: bool = True, methods: bool = True) -> Model:
    """Blocks of these kinds one after the other."""
    blocks = [KINDS[draw.choice(kinds)](draw) for _ in range(draw.randint(1, most))]
    shared = draw.chance(0.1) and len(blocks) > 1
    tokens, tied, frozen = draw.chance(0.3), draw.chance(0.4), draw.chance(0.2)
    out = 12 if tokens else draw.choice([1, 3, WIDTH])
    listed = draw.chance(0.8)  # a ModuleList, or attributes
    rules, sizes, pad = _fields(blocks, listed)
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    if tokens:
        lines.append(f"        self.emb = nn.Embedding(12, {WIDTH})")
        if draw.chance(0.6):
            rules["emb.weight"] = "vocab@tp c@fsdp"
    names = [f"Block{i}()" for i in range(len(blocks))]
    if listed:
        lines.append(f"        self.layers = nn.ModuleList([{', '.join(names)}])")
    else:
        lines += [f"        self.layer{i} = {name}" for i, name in enumerate(names)]
    head = "self.head = nn.Linear"
    lines.append(f"        {head}({WIDTH}, {out}, bias={not (tokens and tied)})")
    if tokens and tied:
        lines.append("        self.head.weight = self.emb.weight")
    if frozen:
        lines.append("        next(self.parameters()).requires_grad_(False)")
    arguments = "".join(dict.fromkeys(block.arguments for block in blocks))
    passes = next((block.passes for block in blocks if HOW in block.passes), "")
    value = {"": "", f", {HOW}": "how", f", [{HOW}]": "how[0]"}.get(passes, "how['value']")
    arguments = ", how" * bool(passes) + ", seen" * (", seen" in arguments)
    method = "" if not methods else draw.choice(["", "", "", "", "", "", "", "features"])
    lines.append(f"    def {method or 'forward'}(self, x{arguments}):")
    lines.append("        x = self.emb(x)" if tokens else "        x = x * 1.0")
    order = [*range(len(blocks)), *([0] if shared else [])]
    again = draw.chance(0.1)
    stateful = {i for i, block in enumerate(blocks) if re.search(r"self\.(calls|mean)", "".join(block.forward))}
    lines += [
        _called(i, blocks[i].passes.replace(HOW, value), listed, again and i not in stateful)  # torch runs it twice
        for i in order
    ]
    lines.append("        return self.head(x)")
    text = "\n\n".join(
        [
            *(b.text(f"Block{i}").replace("BACK", f"Back{i}").replace("OWN", f"Own{i}") for i, b in enumerate(blocks)),
            "\n".join(lines),
        ]
    )
    fields = {"rules": repr(rules)}
    if sizes:
        fields["sizes"] = repr(sizes)
    if pad:
        fields["pad"] = repr(pad)
    if options:
        fields |= _options(draw, listed, len(blocks))
    path = "layers.{}.{}" if listed else "layer{}.{}"
    acts = {path.format(i, name): rule for i, block in enumerate(blocks) for name, rule in block.acts.items()}
    if acts:
        fields["acts"] = repr(acts | ast.literal_eval(fields.get("acts", "{}")))
    passed = passes.replace(HOW, "how") + ", seen" * (", seen" in arguments)
    return Model(text, fields, tokens, passed, out, any(b.one_data_rank for b in blocks), len(blocks), method)


def _fields(blocks: Sequence[Block], listed: bool) -> tuple[dict[str, str], dict[str, int], dict[str, int]]:
    """The rules, sizes and padding of all blocks."""
    rules: dict[str, str] = {}
    sizes: dict[str, int] = {}
    pad: dict[str, int] = {}
    for i, block in enumerate(blocks):
        path = f"layers.{i}" if listed else f"layer{i}"
        rules |= {f"{path}.{name}": _renamed(rule, i) for name, rule in block.rules.items()}
        sizes |= {_renamed(name, i): size for name, size in block.sizes.items()}
        pad |= {_renamed(name, i): size for name, size in block.pad.items()}
    return rules, sizes, pad


def _called(number: int, passes: str, listed: bool, recomputed: bool) -> str:
    """A call of a block, given what it takes beside the stream."""
    call = f"self.layers[{number}]" if listed else f"self.layer{number}"
    again = recomputed and ", seen" not in passes
    prefix = f"torch.utils.checkpoint.checkpoint({call}, " if again else f"{call}("
    return f"        x = {prefix}x{passes}{', use_reentrant=False' * again})"


def _renamed(rule: str, number: int) -> str:
    """Sizes of each block by names of its own."""
    return re.sub(r"\b(ff|gg|heads|kv|d|ch)\b", rf"\g<1>{number}", rule)


def _options(draw: Draw, listed: bool, blocks: int) -> dict[str, str]:
    chosen: dict[str, str] = {}
    if draw.chance(0.3):
        chosen["regather"] = draw.choice(["False", "True"])
    if draw.chance(0.15):
        chosen["units"] = draw.choice(["nn.Linear", "()", "'**.up'"] + (["'layers.*'"] if listed else []))
    if draw.chance(0.15):
        chosen["min_size"] = draw.choice(["10", "1000"])
    if draw.chance(0.1):
        chosen["default"] = "'replicate'"
    if draw.chance(0.12) and listed:
        chosen["acts"] = "{'layers.*': 'b s@tp c'}"
    return chosen
