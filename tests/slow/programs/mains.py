"""What random programs do: losses, derivatives, updates, layouts by hand and classes, as the text of `main(sf, mesh)`.

`main` returns named results, which are the same on one process: `average` takes the mean over data ranks of what each
has, `whole` joins their samples, `full` makes one tensor of a parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from programs.models import WIDTH, Draw, Model, model

MESHES = ({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})
MESHES = (*MESHES, {"fsdp": 1, "tp": 4}, {"replicate": 2, "fsdp": 2, "tp": 1}, {"replicate": 2, "fsdp": 1, "tp": 2})
SPLIT = tuple(mesh for mesh in MESHES if mesh["tp"] > 1)
ORDINARY = ("mlp", "attention", "fused attention", "own parameters", "whole layer", "split layer", "registered")
DERIVATIVES = (
    "argnums",
    "jvp",
    "vjp",
    "hvp",
    "vmap",
    "sf.grad(",
    "autograd.grad",
    "func.grad",
    "outer(",
)  # second, or forward
SMOOTH = ("mlp", "attention", "own parameters", "fused attention")


# So that the others' seeds stay what they were.
YOUNGER = {"operations": "sizes", "backward": "joins", "transforms": "stacks", "by hand": "regions"}


@dataclass(frozen=True)
class Program:
    """A text that defines `main(sf, mesh)`, and the mesh it is for."""

    seed: int
    kind: str
    mesh: dict[str, int]
    text: str


def program(seed: int) -> Program:
    """The program of a seed: kinds take turns, and every fourth turn of some goes to younger ones."""
    names = [name for name in KINDS if name not in YOUNGER.values()]
    turn, at = divmod(seed, len(names))
    kind = YOUNGER.get(names[at], names[at]) if turn % 4 == 3 else names[at]
    draw = Draw(f"{kind} {seed}")
    mesh, text = KINDS[kind](draw)
    return Program(seed, kind, dict(mesh), text)


def _mesh(draw: Draw, built: Model | None = None, among: Sequence[dict[str, int]] = MESHES) -> dict[str, int]:
    """A mesh; more often a small one."""
    if built is not None and built.one_data_rank:
        among = [mesh for mesh in among if _data(mesh) == 1]
    return draw.choices(among, [1 if prod(mesh.values()) == 4 else 3 for mesh in among])[0]


def _data(mesh: dict[str, int]) -> int:
    return mesh["fsdp"] * mesh.get("replicate", 1)


def _text(built: Model, lines: Sequence[str]) -> str:
    body = [line for statement in lines for line in statement.splitlines()]
    names = ("scaled_dot", "MultiheadAttention", "EncoderLayer")
    once = any(name in built.text for name in names) and any(word in " ".join(body) for word in DERIVATIVES)
    head = ["@torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"] if once else []
    return (
        "\n\n".join(
            [built.text, "\n".join([*head, "def main(sf, mesh):", *(f"    {line}" for line in body), "    return out"])]
        )
        + "\n"
    )


def _begin(draw: Draw, built: Model, *, shard: bool = True) -> list[str]:
    """The model, its tree `params`, and this rank's part of a batch `x`, `y`."""
    lines = [
        "out = {}",
        f"torch.manual_seed({draw.randint(0, 99)})",
        "model = Model().double()",
        "[p.data.add_(0.1 * torch.randn_like(p)) for p in model.parameters()]",
    ]
    positions = draw.choice([4, 4, 3, 6])
    if built.tokens:
        lines.append(f"x, y = torch.randint(12, (8, {positions})), torch.randint({built.out}, (8, {positions}))")
    else:
        lines.append(f"x = torch.randn(8, {positions}, {WIDTH}, dtype=torch.float64)")
        lines.append(f"y = torch.randn(8, {positions}, {built.out}, dtype=torch.float64)")
    lines.append("x, y = sf.data.local_batch((x, y), mesh)")
    if draw.chance(0.05):
        hook = draw.choice(["o * 2", "None", "o.sin()"])
        lines.append(
            f"next(m for n, m in model.named_modules() if 'layer' in n).register_forward_hook(lambda m, a, o: {hook})"
        )
    if shard:
        lines += [f"policy = {built.policy()}", "params = sf.shard(model, mesh, policy)"]
    if built.passes:
        lines.append("how, seen = " + _how(built, "0.25") + ", []")
    return lines


def _how(built: Model, value: str) -> str:
    if "{'value'" in built.passes:
        return f"{{'value': {value}}}"
    return f"[{value}]" if "[how]" in built.passes else value


def _call(built: Model) -> str:
    passes = built.passes.replace("{'value': how}", "how").replace("[how]", "how")
    method = f", method='{built.method}'" if built.method else ""
    return f"sf.apply(model, p, x{passes}{method})"


def _error(draw: Draw, built: Model, value: str) -> str:
    """A mean over samples of how far `value` is from y."""
    if built.tokens:
        return draw.choice([f"F.cross_entropy({value}.flatten(0, 1), y.flatten())", f"sf.cross_entropy({value}, y)"])
    return draw.choice([f"({value} - y).square().mean()", f"F.mse_loss({value}, y)", f"F.smooth_l1_loss({value}, y)"])


def _base(draw: Draw, built: Model) -> list[str]:
    """A plain loss, `base(p, x, y)`."""
    return ["def base(p, x, y):", f"    return {_error(draw, built, _call(built))}"]


def _joint(draw: Draw, built: Model) -> list[str]:
    """A loss of two trees, `joint(p, q, x, y)`: a mean over samples, as a product of two means is not."""
    other = _call(built).replace(" p,", " q,")
    value = draw.choice([f"({_call(built)} * {other})", f"({_call(built)} - 0.5 * {other}).sin()"])
    return ["def joint(p, q, x, y):", f"    return {_error(draw, built, value)}"]


def _step(grads: str = "grads") -> list[str]:
    return ["loss, grads = step(params, x, y)", "out['loss'] = loss", f"out['grads'] = sf.gather({grads})"]


# ---------------------------------------------------------------------------------------------------------------------
# Functions


def _blocks(draw: Draw, kinds: Sequence[str] = ORDINARY) -> tuple[dict[str, int], str]:
    built = model(draw, kinds)
    mesh = _mesh(draw, built)
    step = "sf.jit(sf.value_and_grad(base))" if draw.chance(0.03) else "sf.value_and_grad(base)"
    lines = [*_begin(draw, built), *_base(draw, built), f"step = {step}", *_step()]
    if draw.chance(0.4):
        lines += ["with torch.no_grad():", "    out['values'] = whole(" + _call(built).replace(" p,", " params,") + ")"]
    if draw.chance(0.3):
        lines += ["loss, grads = step(params, x, y)", "out['again'] = sf.gather(grads)"]
    lines.append("out['buffers'] = dict(params.buffers)")
    return mesh, _text(built, lines)


def _operations(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ["mixed mlp"], most=2)
    lines = [*_begin(draw, built), *_base(draw, built), "step = sf.value_and_grad(base)", *_step()]
    return _mesh(draw, among=SPLIT), _text(built, lines)


def _sizes(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ["mlp of sizes"], most=2)
    lines = [*_begin(draw, built), *_base(draw, built), "step = sf.value_and_grad(base)", *_step()]
    return _mesh(draw, among=SPLIT), _text(built, lines)


def _joins(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ["joined", "joined", "mlp"], most=2)
    lines = [*_begin(draw, built), *_base(draw, built), "step = sf.value_and_grad(base)", *_step()]
    return _mesh(draw, built, among=SPLIT), _text(built, lines)


def _backward(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ["only backward", "only backward", "mlp", "whole layer"], most=2, options=False)
    lines = [*_begin(draw, built), *_base(draw, built), "step = sf.value_and_grad(base)", *_step()]
    return _mesh(draw, built), _text(built, lines)


def _losses(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ORDINARY, most=2)
    name = draw.choice(["head.weight", "head.weight", "emb.weight" if built.tokens else "head.weight"])
    error, value = _error(draw, built, "z"), "z[..., 0].sigmoid()"
    each = "F.cross_entropy(z.mT, y, reduction='none')" if built.tokens else "(z - y).square().mean(-1)"
    loss = draw.choice(
        [
            f"mask = (x.flatten(2).sum(-1) > 0).double(); return sf.data.Mean((mask * {each}).sum(), mask.sum())"
            if not built.tokens
            else f"mask = x > 3; return sf.data.Mean((mask * {each}).sum(), mask.sum())",
            f"w = {value}; return sf.data.Mean((w * {each}).sum(), w.sum())",
            f"w = z.mean(-1).exp(); return sf.data.Mean((w * {each}).sum(), w.sum())",
            f"return {error} + 0.1 * sf.gather(p)['{name}'].square().sum()",
            f"return {error} * sf.gather(p)['{name}'].norm()",
            f"return {error} + 0.1 * p['{name}'].square().sum()",
            f"return {error} + 0.1 * p['{name}'].norm()",
            f"return {error} * p['{name}'].abs().sum()",
            f"return {error} + 0.01 * sf.tree.dot(p, p)",
            f"return {error} + 0.01 * sf.optim.global_norm(p)",
            "return 0.1 * sf.tree.dot(p, p)",
            f"return {error} + 0.01 * sum(sf.gather(p)[n].abs().sum() for n in ['{name}'])",
            f"return {error} / (1 + sf.gather(p)['{name}'].mean())",
            f"return {error} + 0.01 * (sf.gather(p)['{name}'] @ "
            f"z.flatten(0, 1).T.new_ones({WIDTH if name else 0})).sum()",
        ]
    )
    lines = [*_begin(draw, built), "def base(p, x, y):", f"    z = {_call(built)}", f"    {loss}"]
    lines += ["step = sf.value_and_grad(base)", *_step()]
    return _mesh(draw, built), _text(built, lines)


def _calls(draw: Draw) -> tuple[dict[str, int], str]:
    """Calls of other sizes, other arguments and other attributes."""
    if draw.chance(0.2):
        return _decoding(draw)
    built = model(draw, ["by size", "by argument", "with state", "mlp"], most=2, options=draw.chance(0.3))
    mesh = _mesh(draw, among=SPLIT)
    lines = [*_begin(draw, built), *_base(draw, built), "step = sf.value_and_grad(base)"]
    values = draw.choice([("0.25", "0.75"), ("0.75", "0.25"), ("0.1", "0.2", "0.75"), ("1", "20", "30")])
    sizes = draw.choice([(1, 3), (4, 1), (1, 2, 4), (3, 3), (2, 1)])
    slices = draw.choice(["[:, :n]", "[:, :n]", "[:n]" if _data(mesh) == 1 else "[:, :n]", ""])
    pairs = [(n, values[min(i, len(values) - 1)]) for i, n in enumerate(sizes)]
    steps = ", ".join(f"({n}, {value})" for n, value in pairs)
    lines += [
        f"for i, (n, value) in enumerate([{steps}]):",
        "    for m in model.modules():",
        "        m.how = value",
        f"    how, seen = {_how(built, 'value')}, []",
        f"    loss, grads = step(params, x{slices}, y{slices})",
        "    out[f'loss {i}'], out[f'grads {i}'] = loss, sf.gather(grads)",
        "    out[f'seen {i}'] = {f'{j}': whole(s['x'] if isinstance(s, dict) else s).detach() "
        "for j, s in enumerate(seen)}",
    ]
    lines.append("out['buffers'] = dict(params.buffers)")
    text = _text(built, lines)
    if "seen.append" in text:  # no container that torch's pytrees know
        text = "class Seen(list):\n    pass\n\n" + text.replace(
            ", []\n        loss, grads", ", Seen()\n        loss, grads"
        )
    return mesh, text


def _decoding(draw: Draw) -> tuple[dict[str, int], str]:
    """Some positions, then more, with a cache."""
    built = model(draw, ["cached", "mlp", "cached"], most=1)
    mesh = _mesh(draw, among=SPLIT)
    steps = draw.choice(["(0, 3), (3, 4), (4, 5)", "(0, 1), (1, 2), (2, 3)", "(0, 2), (2, 4), (4, 5)"])
    lines = [*_begin(draw, built), "x = torch.cat([x, x], 1)", "seen = {}"]
    lines += [f"with {draw.choice(['torch.no_grad()', 'torch.inference_mode()'])}:", f"    for a, b in [{steps}]:"]
    call = _call(built).replace(" p,", " params,").replace(" x", " x[:, a:b]", 1)
    lines += [f"        out[f'values {{a}}'] = whole({call}).clone()"]
    return mesh, _text(built, lines)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives


def _features(draw: Draw, kinds: Sequence[str] = SMOOTH, most: int = 2) -> Model:
    """A model of features."""
    while (built := model(draw, kinds, most=most)).tokens:
        pass
    return built


def _inputs(draw: Draw) -> tuple[dict[str, int], str]:
    """Losses that hold derivatives with respect to inputs: forces, penalties, equations."""
    built = _features(draw)
    call = _call(built)
    energy = draw.choice([f"{call}.square().sum()", f"{call}.sum()", f"torch.tanh({call}).sum()"])
    inner = draw.choice(
        [
            "f = sf.grad(energy, argnums=1)(p, x)",
            "_, f = sf.value_and_grad(energy, argnums=1)(p, x)",
            "f = sf.grad(lambda x: energy(p, x))(x)",
            "f, _ = sf.grad(lambda x: (energy(p, x), 0), has_aux=True)(x)",
            "x = x.detach().requires_grad_(); (f,) = torch.autograd.grad(energy(p, x), x, create_graph=True)",
            "f = torch.func.grad(lambda x: energy(p, x))(x)",
            "_, pull = sf.vjp(lambda x: energy(p, x), x); (f,) = pull(torch.ones((), dtype=x.dtype))",
            "_, f = sf.jvp(lambda x: sf.apply(model, p, x), (x,), (torch.ones_like(x),))",
            "f = sf.vmap(sf.grad(lambda x: energy(p, x[None])))(x)",
            "f = sf.grad(lambda x: sf.grad(energy, argnums=1)(p, x).square().sum())(x)",
            "v, f = sf.value_and_grad(energy, argnums=1)(p, x); f = f + 0 * v",
        ]
    )
    outer = draw.choice(
        [
            "return (f - 0.1).square().mean()",
            "return base(p, x, y) + (f.flatten(1).norm(dim=1) - 1).square().mean()",
            "return base(p, x, y) + 0.1 * f.square().mean()",
        ]
    )
    lines = [
        *_begin(draw, built),
        *_base(draw, built),
        "def energy(p, x):",
        f"    return {energy}",
        "def forces(p, x, y):",
    ]
    lines += [f"    {inner}", f"    {outer}", "step = sf.value_and_grad(forces)", *_step()]
    return _mesh(draw, built), _text(built, lines)


def _trees(draw: Draw) -> tuple[dict[str, int], str]:
    """Losses that hold derivatives with respect to trees, several trees, and plain scalars that multiply leaves."""
    built = _features(draw)
    lines = [*_begin(draw, built), *_base(draw, built), *_joint(draw, built)]
    kind = draw.choice(
        ["penalty", "maml", "learnt rate", "mixing", "two trees", "dict", "curvature", "other tree", "adversary"]
    )
    lines += _one_tree(draw, kind) if kind in ONE_TREE else _more(draw, built, kind)
    return _mesh(draw, built), _text(built, lines)


ONE_TREE = ("penalty", "maml", "learnt rate", "curvature")
SCALAR = "alpha = torch.tensor(0.3, dtype=torch.float64)"


def _one_tree(draw: Draw, kind: str) -> list[str]:
    """Losses that hold derivatives with respect to the parameters."""
    inner = "fast = sf.tree.map(lambda w, g: w - {} * g, p, sf.grad(base)(p, x, y))"
    lines: list[str] = []
    if kind == "penalty":
        norm = draw.choice(["sf.optim.global_norm(g).square()", "sf.tree.dot(g, g)", "sf.optim.global_norm(g)"])
        lines += [
            "def outer(p, x, y):",
            "    loss, g = sf.value_and_grad(base)(p, x, y)",
            f"    return loss + 0.1 * {norm}",
        ]
        lines += ["step = sf.value_and_grad(outer)", *_step()]
    elif kind == "maml":
        rate = draw.choice(["0.1", "0.5"])
        lines += ["def outer(p, x, y):", f"    {inner.format(rate)}", "    return base(fast, x, y)"]
        lines += ["step = sf.value_and_grad(outer)", *_step()]
    elif kind == "learnt rate":
        both = draw.chance(0.5)
        lines += [SCALAR, "def outer(p, alpha, x, y):", f"    {inner.format('alpha')}", "    return base(fast, x, y)"]
        lines += [f"loss, found = sf.value_and_grad(outer, argnums={'(0, 1)' if both else '1'})(params, alpha, x, y)"]
        lines += (
            ["out['alpha'] = average(float(found[1]))", "out['grads'] = sf.gather(found[0])"]
            if both
            else ["out['alpha'] = average(float(found))"]
        )
        lines += ["out['loss'] = loss" if both else "out['loss'] = average(loss)"]
    else:
        lines += ["v = sf.tree.map(lambda w: torch.cos(w), params)", "def outer(p, x, y):"]
        lines += [
            "    return base(p, x, y) + 0.1 * sf.tree.dot(v, sf.hvp(base, (p, x, y), v))",
            "step = sf.value_and_grad(outer)",
            *_step(),
        ]
    return lines


def _more(draw: Draw, built: Model, kind: str) -> list[str]:
    """Losses of several trees."""
    lines: list[str] = []
    if kind == "mixing":
        lines += [SCALAR, "other = sf.tree.map(lambda w: w * 0.5 + 0.1, params)", "def outer(t, p, q, x, y):"]
        lines += ["    return base(sf.tree.map(lambda u, v: t * u + (1 - t) * v, p, q), x, y)"]
        lines += ["loss, (slope, g) = sf.value_and_grad(outer, argnums=(0, 1))(alpha, params, other, x, y)"]
        lines += ["out['loss'], out['alpha'], out['grads'] = loss, average(float(slope)), sf.gather(g)"]
    elif kind == "two trees":
        lines += ["other = sf.tree.map(lambda w: w * 0.5 + 0.1, params)", "def outer(p, q, x, y):"]
        lines += ["    return base(p, x, y) + joint(p, q, x, y)"]
        lines += ["loss, (g, h) = sf.value_and_grad(outer, argnums=(0, 1))(params, other, x, y)"]
        lines += ["out['loss'], out['grads'], out['other'] = loss, sf.gather(g), sf.gather(h)"]
    elif kind == "dict":
        lines += ["both = {'a': params, 'b': sf.tree.map(lambda w: w * 0.5 + 0.1, params)}", "def outer(t, x, y):"]
        lines += [
            "    return base(t['a'], x, y) + 0.5 * base(t['b'], x, y)",
            "loss, g = sf.value_and_grad(outer)(both, x, y)",
        ]
        lines += ["out['loss'], out['grads'], out['other'] = loss, sf.gather(g['a']), sf.gather(g['b'])"]
    elif kind == "other tree":
        way = draw.choice(
            ["sf.grad(lambda q: joint(p, q, x, y))(other)", "sf.grad(lambda q, p: joint(p, q, x, y))(other, p)"]
        )
        lines += ["other = sf.tree.map(lambda w: w * 0.5 + 0.1, params)", "def outer(p, x, y):", f"    g = {way}"]
        lines += ["    return sf.tree.dot(g, g)", "step = sf.value_and_grad(outer)", *_step()]
    else:
        lines += [
            "other = sf.tree.map(lambda w: w * 0.5 + 0.1, params)",
            "def critic(q, x):",
            f"    return {_call(built).replace(' p,', ' q,')}",
        ]
        lines += ["def outer(q, p, x, y):", f"    z = {_call(built)}.mean(-1, keepdim=True) + x"]
        lines += [
            "    f = sf.grad(lambda z: critic(q, z).sum())(z)",
            "    return critic(q, z).mean() + 10 * (f.flatten(1).norm(dim=1) - 1).square().mean()",
        ]
        lines += ["loss, (g, h) = sf.value_and_grad(outer, argnums=(0, 1))(other, params, x, y)"]
        lines += ["out['loss'], out['grads'], out['other'] = loss, sf.gather(g), sf.gather(h)"]
    return lines


def _transforms(draw: Draw) -> tuple[dict[str, int], str]:
    """`vmap`, `jvp`, `vjp`, `hvp`, and one in another."""
    built = _features(draw)
    stack = "stack = sf.tree.map(lambda w: torch.stack([w.cos(), w.sin()]), params)"
    direction = "v = sf.tree.map(lambda w: torch.cos(w), params)"
    f = "lambda p: base(p, x, y)"
    body = draw.choice(
        [
            [direction, "out['hvp'] = sf.gather(sf.hvp(base, (params, x, y), v))"],
            [direction, f"value, slope = sf.jvp({f}, (params,), (v,))", "out['slope'] = average(slope)"],
            [
                direction,
                "_, h = sf.jvp(lambda p: sf.grad(base)(p, x, y), (params,), (v,))",
                "out['hvp'] = sf.gather(h)",
            ],
            [f"value, pull = sf.vjp({f}, params)", "out['grads'] = sf.gather(pull(torch.ones((), dtype=x.dtype))[0])"],
            [
                "each = sf.vmap(sf.grad(lambda p, x, y: base(p, x[None], y[None])), in_dims=(None, 0, 0))"
                "(params, x, y)",
                "out['each'] = sf.gather(each)",
            ],
            [stack, f"s = sf.vmap(lambda v: sf.jvp({f}, (params,), (v,))[1])(stack)", "out['slopes'] = average(s)"],
            [
                stack,
                "h = sf.vmap(lambda v: sf.hvp(base, (params, x, y), v))(stack)",
                "out['hvps'] = {n: full(w) for n, w in h.items()} if 0 "
                "else sf.gather(sf.tree.map(lambda w: w.sum(0), h))",
            ],
            [
                "out['each'] = whole(sf.vmap("
                "lambda x, y: sf.jvp(lambda x: base(params, x[None], y[None]), (x,), (x,))[1])(x, y))"
            ],
            [
                "out['each'] = whole(sf.vmap(lambda x, y: sf.vjp(lambda x: base(params, x[None], y[None]), x)"
                "[1](torch.ones((), dtype=x.dtype))[0])(x, y))"
            ],
            ["out['each'] = whole(sf.vmap(lambda x, y: base(params, x[None], y[None]))(x, y))"],
            ["out['each'] = whole(sf.vmap(sf.grad(lambda x, y: base(params, x[None], y[None])))(x, y))"],
            [
                direction,
                "out['each'] = whole(sf.vmap("
                "lambda x, y: sf.jvp(lambda p: base(p, x[None], y[None]), (params,), (v,))[1])(x, y))",
            ],
            [
                "step = sf.value_and_grad("
                "lambda p, x, y: sf.vmap(lambda x, y: base(p, x[None], y[None]))(x, y).square().mean())",
                *_step(),
            ],
            ["step = sf.value_and_grad(lambda p, x, y: sf.jvp(lambda q: base(q, x, y), (p,), (p,))[1])", *_step()],
            [
                "ones = sf.tree.map(torch.ones_like, params)",
                "step = sf.value_and_grad(lambda p, x, y: sf.jvp(lambda q: base(q, x, y), (p,), (ones,))[1])",
                *_step(),
            ],
        ]
    )
    lines = [*_begin(draw, built), *_base(draw, built), *body]
    return _mesh(draw, built), _text(built, lines)


OF_ALL = "{name: w[i] for name, w in sf.gather(s).items()}"


def _stacks(draw: Draw) -> tuple[dict[str, int], str]:
    """A tree of several members side by side: `vmap` over it, derivatives around that, updates of it."""
    built = _features(draw)
    members = draw.choice([2, 2, 3])
    parts = ", ".join(draw.sample(["w", "1.1 * w", "0.9 * w", "w.sin()", "w + 0.1"], members))
    fold = draw.choice([".prod(0)", ".mean(0)", ".var(0)", ".logsumexp(0)", "[0]", ".sum(0).sin()"])
    error = _error(draw, built, f"sf.vmap(lambda p: {_call(built)})(t){fold}")
    total = draw.choice(
        [
            error,
            error,
            f"{error} + 0.01 * sf.tree.dot(t, t)",
            f"sf.vmap(base, in_dims=(0, None, None))(t, x, y).{draw.choice(['sum()', 'mean()', '__getitem__(-1)'])}",
            "sf.tree.dot(sf.vmap(sf.grad(base), in_dims=(0, None, None))(t, x, y), t)",
            f"base(sf.tree.map(lambda w: w{draw.choice(['.mean(0)', '.sum(0)', '[0]', '.unbind()[-1]'])}, t), x, y)",
        ]
    )
    lines = [*_begin(draw, built), *_base(draw, built), "def coupled(t, x, y):", f"    return {total}"]
    lines += [f"t = sf.tree.map(lambda w: torch.stack([{parts}]), params)"]
    lines += ["ones, f = torch.ones((), dtype=x.dtype), lambda t: coupled(t, x, y)"]
    direction = f"v = {draw.choice(['sf.tree.map(torch.cos, t)', 't', 'sf.tree.map(lambda w: 0.5 * w, t)'])}"
    lines += draw.choice(
        [
            ["out['loss'], g = sf.value_and_grad(coupled)(t, x, y)"],
            ["out['loss'], g = sf.value_and_grad(coupled)(t, x, y)"],
            ["value, pull = sf.vjp(f, t)", "g = pull(ones)[0]"],
            [direction, "out['slope'], g = average(sf.jvp(f, (t,), (v,))[1]), v"],
            [direction, "g = sf.hvp(coupled, (t, x, y), v)"],
            [direction, "g = sf.jvp(lambda t: sf.grad(coupled)(t, x, y), (t,), (v,))[1]"],
            [
                "def ahead(t, x, y):",
                "    return coupled(sf.tree.map(lambda w, g: w - 0.5 * g, t, sf.grad(coupled)(t, x, y)), x, y)",
                "out['loss'], g = sf.value_and_grad(ahead)(t, x, y)",
            ],
            ["g = sf.vmap(sf.grad(base), in_dims=(0, None, None))(t, x, y)"],
            [
                f"xs, ys = torch.stack([x, x.sin(), x.cos()][:{members}]), torch.stack([y] * {members})",
                "g = sf.vmap(sf.grad(base))(t, xs, ys)",
            ],
        ]
    )
    if draw.chance(0.5):
        lines += [
            f"optimizer = {draw.choice(OPTIMIZERS[:7])}",
            "state = optimizer.init(t)",
            "for _ in range(2):",
            f"    t, state = optimizer.step(t, {draw.choice(['g', 'g', 'sf.optim.clip(g, 0.1)[0]'])}, state)",
            "    g = sf.grad(coupled)(t, x, y)",
        ]
    lines += draw.choice([[], ["g = sf.tree.ema(t, g, decay=0.9)"], ["g = sf.tree.map(lambda w, g: w * g, t, g)"]])
    lines += draw.choice([[], ["out['norm'] = sf.optim.global_norm(g)"], ["out['dot'] = sf.tree.dot(t, g)"]])
    lines += [
        f"for i in range({members}):",
        f"    of = lambda s: {draw.choice(['sf.gather(sf.tree.map(lambda w: w[i], s))', OF_ALL])}",
        "    out[f't {i}'], out[f'g {i}'] = of(t), of(g)",
    ]
    return _mesh(draw, built), _text(built, lines)


# ---------------------------------------------------------------------------------------------------------------------
# Updates


CLASSES = {
    "ROWS": [
        "class Rows(torch.optim.Optimizer):",
        "    def __init__(self, params, lr):",
        "        super().__init__(params, {'lr': lr})",
        "    @torch.no_grad()",
        "    def step(self):",
        "        for group in self.param_groups:",
        "            for p in group['params']:",
        "                p.add_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-3) if p.dim() > 1 else p.grad, "
        "alpha=-group['lr'])",
    ],
    "SIGNS": [
        "class Signs(torch.optim.Optimizer):",
        "    def __init__(self, params, lr):",
        "        super().__init__(params, {'lr': lr})",
        "    @torch.no_grad()",
        "    def step(self):",
        "        for group in self.param_groups:",
        "            for p in group['params']:",
        "                p.add_(torch.tanh(10 * p.grad), alpha=-group['lr'])",
    ],
    "TRUST": [
        "class Trust(torch.optim.SGD):",
        "    @torch.no_grad()",
        "    def step(self):",
        "        for group in self.param_groups:",
        "            for p in group['params']:",
        "                p.mul_(1 - group['lr'] * p.grad.flatten(0, -2).sum(0).abs().max() if p.dim() > 1 else 1.0)",
        "        super().step()",
    ],
}
OPTIMIZERS = (
    "sf.optim.adamw(1e-2, eps=1e-4)",
    "sf.optim.sgd(0.1)",
    "sf.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "sf.optim.chain(sf.optim.clip_by_global_norm(0.1), sf.optim.adamw(1e-2, eps=1e-4, weight_decay=0.1))",
    "sf.optim.chain(sf.optim.clip_by_global_norm(0.1), sf.optim.sgd(0.1))",
    "sf.optim.from_torch(torch.optim.AdamW, lr=1e-2, eps=1e-4)",
    "sf.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)",
    "sf.optim.from_torch(torch.optim.RMSprop, lr=1e-2, eps=1e-3)",
    "sf.optim.from_torch(torch.optim.Adagrad, lr=1e-2, eps=1e-3)",
    "sf.optim.from_torch(torch.optim.NAdam, lr=1e-2, eps=1e-3)",
    "sf.optim.from_torch(torch.optim.RAdam, lr=1e-2, eps=1e-3)",
    "sf.optim.from_torch(torch.optim.Adamax, lr=1e-2, eps=1e-3)",
    "sf.optim.from_torch(torch.optim.Adadelta, lr=0.5)",
    "sf.optim.from_torch(torch.optim.Adafactor, lr=1e-2)",
    "sf.optim.from_torch(Rows, lr=1e-2)",
    "sf.optim.from_torch(Rows, lr=1e-2)",
    "sf.optim.from_torch(Signs, lr=1e-2)",
    "sf.optim.from_torch(Trust, lr=1e-2)",
)


def _updates(draw: Draw) -> tuple[dict[str, int], str]:
    """Two steps: optimizers, accumulation, clipping, averages."""
    built = model(draw, ORDINARY, most=2)
    optimizer = draw.choice(OPTIMIZERS)
    lines = [*_begin(draw, built), *_base(draw, built)]
    for name, text in CLASSES.items():
        if f"({name.title()}," in optimizer:
            lines[0:0] = text
    lines += [
        f"optimizer = {optimizer}",
        "state = optimizer.init(params)",
        "average_of = sf.tree.map(torch.clone, params)",
    ]
    way = draw.choice(["plain", "plain", "accumulate", "sum", "pure", "clip", "reshard", "mean of two"])
    lines.append("for _ in range(2):")
    if way == "accumulate":
        lines += [
            "    parts = list(zip(x.chunk(2), y.chunk(2)))",
            "    pending = sf.value_and_grad(base, reduce=None)",
            "    found = [pending(params, *part)[1] for part in parts]",
            "    grads = sf.reduce_grads(sf.tree.map(lambda *gs: sum(gs) / len(gs), *found))",
        ]
    elif way == "mean of two":
        lines += ["    found = [sf.grad(base)(params, *part) for part in zip(x.chunk(2), y.chunk(2))]"]
        lines += ["    grads = sf.tree.lerp(found[0], found[1], 0.5)"]
    elif way == "sum":
        lines += ["    grads = sf.grad(lambda p, x, y: base(p, x, y) * x.shape[0], reduce='sum')(params, x, y)"]
    else:
        lines += ["    grads = sf.grad(base)(params, x, y)"]
    if way == "clip":
        lines += ["    grads, norm = sf.optim.clip(grads, 0.1)", "    out['norm'] = norm"]
    if way == "pure":
        lines += [
            "    updates, state = optimizer.update(grads, state, params)",
            "    params = sf.optim.apply_updates(params, updates)",
        ]
    else:
        lines += ["    params, state = optimizer.step(params, grads, state)"]
    if way == "reshard":
        lines += [
            "    params, average_of = (sf.reshard(t, sf.Policy()) for t in (params, average_of))",
            "    state = optimizer.init(params)",
        ]
    lines += [
        "    average_of = sf.tree.ema(average_of, params, decay=0.9)",
        "out['params'], out['ema'] = sf.gather(params), sf.gather(average_of)",
    ]
    lines += ["out['norm of all'] = sf.optim.global_norm(params)"]
    return _mesh(draw, built), _text(built, lines)


def _by_hand(draw: Draw) -> tuple[dict[str, int], str]:
    """`reshard`, `gather`, `reduce_grads` and optimizers, in and beside losses."""
    built = _features(draw, ORDINARY)
    lines = [*_begin(draw, built), *_base(draw, built), *_joint(draw, built)]
    other = draw.choice(["sf.Policy()", "sf.Policy(default='replicate')", "policy", "sf.Policy(min_size=100)"])
    optimizer = draw.choice(["sf.optim.sgd(0.5)", "sf.optim.adamw(1e-2, eps=1e-2)", "sf.optim.sgd(0.5, momentum=0.9)"])
    inner = draw.choice(
        [
            [f"return base(sf.reshard(p, {other}), x, y)"],
            [f"q = sf.reshard(p, {other})", "return base(p, x, y) + joint(p, q, x, y)"],
            ["w = sf.gather(p, to='cpu')['head.weight']", "return base(p, x, y) + w.square().sum()"],
            ["w = sf.gather(p, to='cpu')", "return base(p, x, y) + sum(t.square().sum() for t in w.values())"],
            ["w = sf.gather(p)['head.weight'].cpu()", "return base(p, x, y) + w.square().sum()"],
            [f"w = sf.gather(sf.reshard(p, {other}))['head.weight']", "return base(p, x, y) * w.norm()"],
            ["g = sf.reduce_grads(sf.grad(base, reduce=None)(p, x, y))", "return base(p, x, y) + sf.tree.dot(g, g)"],
            ["g = sf.reduce_grads(sf.grad(base)(p, x, y))", "return base(p, x, y) + sf.tree.dot(g, g)"],
            [f"o = {optimizer}", "q, _ = o.step(p, sf.grad(base)(p, x, y), o.init(p))", "return base(q, x, y)"],
            [
                f"o = {optimizer}",
                "u, _ = o.update(sf.grad(base)(p, x, y), o.init(p), p)",
                "return base(sf.tree.map(torch.add, p, u), x, y)",
            ],
            ["q = sf.tree.map(lambda w: 2 * w, p)", f"return base(sf.reshard(q, {other}), x, y)"],
            ["q = sf.tree.cast(p, torch.float64)", "return base(q, x, y)"],
            ["q = sf.tree.lerp(p, sf.tree.zeros_like(p), 0.1)", "return base(q, x, y)"],
            ["q = sf.tree.ema(p, sf.tree.map(torch.sin, p), decay=0.5)", "return base(q, x, y)"],
        ]
    )
    lines += ["def outer(p, x, y):", *(f"    {line}" for line in inner), "step = sf.value_and_grad(outer)", *_step()]
    return _mesh(draw, built), _text(built, lines)


def _regions(draw: Draw) -> tuple[dict[str, int], str]:
    """Regions of `shard_map` and sums over data axes in losses, and derivatives of these."""
    mesh = _mesh(draw)
    axes = [axis for axis in ("replicate", "fsdp") if axis in mesh]
    batch = "b" + "".join(f"@{axis}" for axis in axes)
    up, down, whole = draw.choice(
        [
            ("f@tp c", "c f@tp", "u, d"),
            ("f@tp c@fsdp", "c@fsdp f@tp", "gathered(u, 1), gathered(d, 0)"),
            ("f@tp c", "c@fsdp f@tp", "u, gathered(d, 0)"),
        ]
    )
    means = [f"    m = sf.collectives.pmean(m, mesh, '{axis}')" for axis in axes]
    varied = [f"    m = sf.collectives.pvary(m, mesh, '{axis}')" for axis in axes if draw.chance(0.8)]
    folded = draw.choice(["((z - m) ** 2).mean()", "(m - 1).square().sum()", "(m * z).mean()"])
    inside = [f"    u, d = {whole}", "    z = sf.collectives.psum(torch.tanh(x @ u.T) @ d.T, mesh, 'tp')"]
    body = draw.choice(
        [
            [
                f"@sf.shard_map('{batch} c, {up}, {down} -> {batch} c', mesh)",
                *("def region(x, u, d):", *inside, "    return z"),
                *("def f(p, x, y):", "    return region(x, p['u'], p['d']).square().mean()"),
            ],
            [
                f"@sf.shard_map('{batch} c, {batch} c, {up}, {down} -> ', mesh)",
                *("def region(x, y, u, d):", *inside, "    m = (z - y).square().mean()", *means, "    return m"),
                *("def f(p, x, y):", "    return region(x, y, p['u'], p['d'])"),
            ],
            [
                *("def f(p, x, y):", "    z = sf.apply(model, p, x)", "    m = z.mean(0)", *means, *varied),
                f"    return {folded}",
            ],
        ]
    )
    g = "out['g'] = sf.gather(%s)"
    size = "1" if "region" in " ".join(body) else "x.shape[0]"  # a loss of all ranks, or that of one
    way = draw.choice(
        [
            ["loss, grads = sf.value_and_grad(f)(p, x, y)", "out['loss'] = average(loss)", g % "grads"],
            [g % "sf.grad(lambda p: sf.tree.dot(sf.grad(f)(p, x, y), v))(p)"],
            [g % "sf.hvp(f, (p, x, y), v)"],
            [g % "sf.vjp(lambda p: f(p, x, y), p)[1](torch.ones((), dtype=x.dtype))[0]"],
            ["out['slope'] = average(sf.jvp(lambda p: f(p, x, y), (p,), (v,))[1])"],
            [g % f"sf.grad(lambda p: sf.grad(lambda x: f(p, x, y) * {size})(x).square().sum(-1).mean())(p)"],
            [g % "sf.vmap(sf.grad(lambda p, x, y: f(p, x[None], y[None])), in_dims=(None, 0, 0))(p, x, y)"],
            [
                "t = sf.tree.map(lambda w: torch.stack([w, w.sin()]), p)",
                g % "sf.tree.map(lambda w: w[1], sf.vmap(sf.grad(f), in_dims=(0, None, None))(t, x, y))",
            ],
        ]
    )
    lines = [
        "out = {}",
        f"torch.manual_seed({draw.randint(0, 99)})",
        "x, y, u, d = (torch.randn(*n, dtype=torch.float64) for n in ((8, 8), (8, 8), (16, 8), (8, 16)))",
        "x, y = sf.data.local_batch((x, y), mesh)",
        "gathered = lambda w, dim: sf.collectives.all_gather(w, mesh, 'fsdp', dim)",
    ]
    if "    z = sf.apply(model, p, x)" in body:
        lines += [
            "model = nn.Linear(8, 8).double()",
            f"policy = {draw.choice(['sf.Policy()', 'sf.Policy(min_size=100)'])}",
        ]
        lines += ["p = sf.shard(model, mesh, policy)"]
    else:
        lines += [f"p = sf.shard({{'u': u, 'd': d}}, mesh, sf.Policy(rules={{'u': '{up}', 'd': '{down}'}}))"]
    lines += ["v = sf.tree.map(torch.cos, p)", *body, *way, "return out"]
    text = "\n".join(["def main(sf, mesh):", *(f"    {line}" for line in lines)]) + "\n"
    return mesh, text


def _habits(draw: Draw) -> tuple[dict[str, int], str]:
    """What people write who know other libraries."""
    built = _features(draw, ORDINARY)
    lines = [*_begin(draw, built), *_base(draw, built)]
    plain = _error(draw, built, f"model.{built.method}(x)" if built.method else "model(x)")
    body = draw.choice(
        [
            [f"step = sf.value_and_grad(lambda p, x, y: {plain})", *_step()],
            [f"step = sf.value_and_grad(lambda p, x, y: {plain} + 0.0 * base(p, x, y).detach())", *_step()],
            ["step = sf.value_and_grad(lambda p, x, y: base(params, x, y))", *_step()],
            [
                "optimizer = torch.optim.SGD(params.values(), lr=0.1)",
                f"{plain}.backward()",
                "optimizer.step()",
                "out['params'] = sf.gather(params)",
            ],
            [
                "leaves = sf.tree.map(lambda w: w.detach().requires_grad_(), params)",
                "base(leaves, x, y).backward()",
                "out['grads'] = {'head': full(leaves['head.weight'].grad)}",
            ],
            [
                "grads = sf.grad(base)(params, x, y)",
                "params = {n: w - 0.1 * grads[n] for n, w in params.items()}",
                "out['loss'] = average(base(params, x, y))",
            ],
            [
                "grads = sf.grad(base)(params, x, y)",
                "with torch.no_grad():",
                "    for n, w in params.items():",
                "        w.sub_(0.1 * grads[n])",
                "out['params'] = sf.gather(params)",
            ],
            ["out['grads'] = sf.gather(torch.func.grad(base)(params, x, y))"],
            ["out['values'] = whole(torch.func.vmap(lambda x: sf.apply(model, params, x[None])[0])(x))"],
            ["with torch.no_grad():", "    out['loss'] = average(base(params, x, y))"],
            ["model.load_state_dict(sf.gather(params))", f"out['loss'] = average({plain})"],
            [
                "teacher = sf.shard(model, mesh, policy)",
                "with torch.no_grad():",
                f"    t = {_call(built).replace(' p,', ' teacher,')}",
                "step = sf.value_and_grad(lambda p, x, y: base(p, x, t.sin()))",
                *_step(),
            ],
            [
                "step = sf.value_and_grad(lambda p, x, y: sum(w.square().sum() for w in sf.gather(p).values()))",
                *_step(),
            ],
            ["step = sf.value_and_grad(lambda p, x, y: base(p, x, y).detach())", *_step()],
            ["step = sf.value_and_grad(lambda p, x, y: torch.zeros((), dtype=x.dtype))", *_step()],
        ]
    )
    return _mesh(draw, built), _text(built, [*lines, *body])


# ---------------------------------------------------------------------------------------------------------------------
# Classes

DATA = ({"fsdp": 1}, {"fsdp": 2}, {"fsdp": 4})


def _loop(draw: Draw, built: Model, *, syncs: Sequence[str], clips: Sequence[str]) -> list[str]:
    """Two steps of `model` with one of torch's optimizers."""
    optimizer = draw.choice(
        [
            "AdamW(model.parameters(), lr=1e-2, eps=1e-4)",
            "SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "Adam(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)",
        ]
    )
    error = _error(draw, built, "model(x)").replace(
        "sf.cross_entropy(model(x), y)", "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"
    )
    lines = [f"optimizer = torch.optim.{optimizer}", "for i in range(2):", "    optimizer.zero_grad()"]
    if draw.chance(0.25):
        half = error.replace("model(x)", "model(a)").replace(" y", " b").replace("y.flatten", "b.flatten")
        first, second = syncs
        lines += ["    halves = list(zip(x.chunk(2), y.chunk(2)))", *(f"    {line}" for line in first.splitlines())]
        lines += [
            "        a, b = halves[0]",
            f"        ({half} / 2).backward()",
            *(f"    {line}" for line in second.splitlines()),
        ]
        lines += ["    a, b = halves[1]", f"    ({half} / 2).backward()"]
    else:
        extra = draw.choice(["", "", "", " + 0.01 * model.head.weight.square().sum()", " * 2"])
        lines += [f"    loss = {error}{extra}", "    loss.backward()"]
        if not extra:
            lines.append("    out[f'loss {i}'] = average(loss.detach())")
    lines += [f"    out[f'norm {{i}}'] = full({draw.choice(clips)})"] if draw.chance(0.4) else []
    lines += (
        ["    out[f'grads {i}'] = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}"]
        if draw.chance(0.5)
        else []
    )
    lines += ["    optimizer.step()"]
    lines += ["out['params'] = {n: full(p) for n, p in model.named_parameters()}"]
    lines += ["out['buffers'] = dict(model.named_buffers())"] if draw.chance(0.5) else []
    return lines


def _for_class(draw: Draw) -> Model:
    kinds = ("mlp", "attention", "own parameters", "whole layer", "mixed mlp", "fused attention")
    return model(draw, kinds, options=False, methods=False)


PARAMS = "out['params'] = sf.gather(model.params)"  # in the model's shapes
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"


def _fsdp1(draw: Draw) -> tuple[dict[str, int], str]:
    built = _for_class(draw)
    policy = draw.choice(
        [
            "None",
            "torch.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear})",
            "torch.distributed.fsdp.wrap.ModuleWrapPolicy({Block0})",
        ]
    )
    strategy = draw.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    lines = [*_begin(draw, built, shard=False)]
    lines += [
        f"model = sf.compat.fsdp1.FullyShardedDataParallel(model, auto_wrap_policy={policy},",
        f"    sharding_strategy=torch.distributed.fsdp.ShardingStrategy.{strategy}, "
        f"use_orig_params={draw.chance(0.5)})",
        *_loop(draw, built, syncs=("with model.no_sync():", ""), clips=("model.clip_grad_norm_(0.5)", CLIP)),
    ]
    return draw.choice(DATA), _text(built, lines)


def _fsdp2(draw: Draw) -> tuple[dict[str, int], str]:
    built = _for_class(draw)
    again = draw.choice(["True", "False", "2" if draw.chance(0.2) else "True"])
    lines = [*_begin(draw, built, shard=False)]
    if draw.chance(0.7):
        lines += [
            "for block in [m for n, m in model.named_children() "
            "if n.startswith('layer') and not isinstance(m, nn.ModuleList)] + list(getattr(model, 'layers', [])):",
            "    sf.compat.fsdp2.fully_shard(block, mesh=mesh, "
            f"reshard_after_forward={again if again != '2' else 'True'})",
        ]
    lines += ["sf.compat.fsdp2.fully_shard(model, mesh=mesh)"]
    if draw.chance(0.4):
        lines += [f"model.load_state_dict(model.state_dict(), assign={draw.choice(['True', 'True', 'False'])})"]
    syncs = ("model.set_requires_gradient_sync(False)\nif True:", "model.set_requires_gradient_sync(True)")
    lines += _loop(draw, built, syncs=syncs, clips=(CLIP,))
    return draw.choice(DATA), _text(built, lines)


def _hfai(draw: Draw) -> tuple[dict[str, int], str]:
    built = _for_class(draw)
    lines = [*_begin(draw, built, shard=False)]
    again = draw.choice(["True", "False"])
    lines += [f"model = sf.compat.hfai.FullyShardedDataParallel(model, None, None, {again})"]
    lines += _loop(draw, built, syncs=("with model.no_sync():", ""), clips=("model.clip_grad_norm_(0.5)",))
    return draw.choice(DATA), _text(built, lines)


def _megatron(draw: Draw) -> tuple[dict[str, int], str]:
    built = _for_class(draw)
    lines = ["from types import SimpleNamespace", *_begin(draw, built, shard=False)]
    lines += ["config = SimpleNamespace(transformer_impl='local', recompute_granularity=None)"]
    wrap = draw.choice(["{nn.Linear}", "{Block0}"])
    lines += [
        "model = sf.compat.megatron.TorchFullyShardedDataParallel("
        f"config, SimpleNamespace(), model, sub_modules_to_wrap={wrap})"
    ]
    loop = _loop(draw, built, syncs=("with model.no_sync():", ""), clips=(CLIP,))
    lines += [
        line.replace("model.head", "model.module.head").replace(
            "in model.named_parameters", "in model.module.named_parameters"
        )
        for line in loop
    ]
    return draw.choice(DATA), _text(built, lines)


def _trainer(draw: Draw) -> tuple[dict[str, int], str]:
    built = model(draw, ORDINARY, most=2, methods=False)
    mesh = _mesh(draw, built)
    begin = _begin(draw, built)[:-1]
    if built.passes or begin[-1].startswith("params"):
        begin = [line for line in begin if not line.startswith("params")]
    lines = [*begin, *_base(draw, built)]
    if draw.chance(0.5):
        optimizer = draw.choice(OPTIMIZERS[:9])
        extra = draw.choice(["", ", accumulate=2", ", clip=0.1", ", ema=0.9", ", clip=0.1, accumulate=2"])
        if draw.chance(0.25) and not built.tokens:
            lines[-1] = (
                f"    z = {_call(built)}; w = {draw.choice(['z[..., 0].sigmoid()', '(y[..., 0] > 0).double()'])}"
            )
            lines += ["    return sf.data.Mean((w * (z - y).square().mean(-1)).sum(), w.sum())"]
        lines += [f"trainer = sf.Trainer(model, mesh, policy, optimizer={optimizer}, loss_fn=base{extra})"]
        lines += [
            "for i in range(2):",
            "    found = trainer.step(x, y)",
            "    out[f'loss {i}'], out[f'norm {i}'] = found['loss'], found['grad_norm']",
        ]
        lines += [PARAMS.replace("model", "trainer"), "out['loss'] = trainer.evaluate(x, y)['loss']"]
        return mesh, _text(built, [line.replace("average_of", "ema") for line in lines])
    lines += ["model = sf.Trainer(model, mesh, policy)"]
    loop = _loop(draw, built, syncs=("with model.no_sync():", ""), clips=("model.clip_grad_norm_(0.5)", CLIP))
    loop = [line.replace("model.head", "model.module.head") for line in loop if "out[f'grads" not in line]
    return mesh, _text(built, [*lines, *(PARAMS if "out['params']" in line else line for line in loop)])


KINDS: dict[str, Callable[[Draw], tuple[dict[str, int], str]]] = {
    "blocks": _blocks,
    "operations": _operations,
    "sizes": _sizes,
    "joins": _joins,
    "backward": _backward,
    "losses": _losses,
    "calls": _calls,
    "inputs": _inputs,
    "trees": _trees,
    "transforms": _transforms,
    "stacks": _stacks,
    "updates": _updates,
    "by hand": _by_hand,
    "regions": _regions,
    "habits": _habits,
    "Trainer": _trainer,
    "FSDP1": _fsdp1,
    "FSDP2": _fsdp2,
    "hfai": _hfai,
    "Megatron": _megatron,
}
