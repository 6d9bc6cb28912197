"""Operations on an activation `h` [batch, positions, features] beside the stream `x` [batch, positions, width].

Each is text, and gives a tensor of the shape of `h`. Nothing mixes samples, which data ranks could not do either.
"""

ELEMENTWISE = """
F.relu(h) | F.gelu(h) | F.gelu(h, approximate="tanh") | F.silu(h) | torch.tanh(h) | torch.sigmoid(h) | h.sin() | h.cos()
torch.exp(0.1 * h) | h.abs() | h.square() | (h.square() + 1).sqrt() | torch.log1p(h.square()) | F.softplus(h)
F.leaky_relu(h, 0.1) | F.elu(h) | F.selu(h) | F.mish(h) | F.hardtanh(h) | F.softsign(h) | torch.atan(h) | torch.erf(h)
h.clamp(-0.5, 0.5) | h.clamp(min=0) | h * 2 | h / 3 | h - 1 | 1 - h | -h | h.pow(3) | h * h | h + h.sin() | h ** 2
torch.where(h > 0, h, 0.1 * h) | h.masked_fill(h < 0, 0.0) | torch.maximum(h, -h) | torch.minimum(h, h * 0.5)
torch.lerp(h, h.sin(), 0.3) | torch.addcmul(h, h, h) | h.detach() + h | h.clone() | h.contiguous() | h.nan_to_num()
torch.hypot(h, h + 1) | torch.xlogy(h.square() + 1, h.square() + 2) | torch.logaddexp(h, -h) | h.sinh() | h.asinh()
torch.special.expit(h) | F.threshold(h, 0.1, 0.0) | F.hardswish(h) | F.logsigmoid(h) | h.sign() * h | h.to(h.dtype)
h.reciprocal().clamp(-2, 2) | (h > 0).to(h.dtype) * h | h.relu().add(0.1) | torch.nn.functional.relu6(h) | h.double()
torch.add(h, h, alpha=0.5) | torch.sub(h, h.sin(), alpha=2) | torch.rsub(h, 1) | h.fmod(0.7) | h.remainder(0.9)
h.frac()
""".replace("\n", " | ")

# {d} is a dim.
ALONG = """
h.softmax({d}) | h.log_softmax({d}) | h.cumsum({d}) | h.flip({d}) | h.roll(1, {d}) | h.sort({d}).values
h - h.mean({d}, keepdim=True) | h / (h.norm(dim={d}, keepdim=True) + 1) | h - h.amax({d}, keepdim=True)
h * h.sum({d}, keepdim=True) | F.normalize(h, dim={d}) | h / (h.std({d}, keepdim=True) + 1)
h - h.logsumexp({d}, keepdim=True) | torch.cat([h.narrow({d}, 1, h.shape[{d}] - 1), h.narrow({d}, 0, 1)], {d})
torch.stack([h, -h.sin()], {d}).sum({d}) | torch.cat(h.chunk(2, {d}), {d}) | torch.cat(h.chunk(2, {d})[::-1], {d})
torch.cat(h.split(2, {d}), {d}) | torch.stack(h.unbind({d}), {d})
h.index_select({d}, torch.arange(h.shape[{d}]).flip(0))
h.repeat_interleave(2, {d}).narrow({d}, 0, h.shape[{d}]) | h.unsqueeze({d}).sin().squeeze({d}) | h.cumprod({d})
h.gather({d}, h.argsort({d})) | h.movedim({d}, 0).movedim(0, {d}) | h.transpose({d}, 0).sin().transpose({d}, 0)
h * h.var({d}, keepdim=True) | h + h.median({d}, keepdim=True).values | h.narrow({d}, 0, 1) + h
h.select({d}, 0).unsqueeze({d}) * h
h * torch.arange(h.shape[{d}], dtype=h.dtype).unflatten(0, (-1, *(1,) * (h.dim() - 1 - ({d} % h.dim()))))
h.scatter({d}, torch.zeros_like(h.narrow({d}, 0, 1), dtype=torch.long), 0.0) | h - h.narrow({d}, -1, 1)
h * h.prod({d}, keepdim=True)
h.masked_fill(torch.arange(h.shape[{d}]).unflatten(0, (-1, *(1,) * (h.dim() - 1 - ({d} % h.dim())))) == 0, 0.0)
""".replace("\n", " | ")

SHAPES = """
h.flatten(0, 1).view(h.shape) | h.reshape(-1, h.shape[-1]).sin().reshape(h.shape) | h.transpose(1, 2).reshape(h.shape)
h.transpose(1, 2).transpose(1, 2) | h.unflatten(-1, (-1, 2)).flatten(-2) | h.unflatten(-1, (2, -1)).flatten(-2)
h.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) | h.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)
h.unflatten(-1, (2, -1)).softmax(-1).flatten(-2) | h.unflatten(-1, (2, -1)).sum(-2).repeat(1, 1, 2)
h.permute(2, 0, 1).sin().permute(1, 2, 0) | h.view(*h.shape[:2], -1, 2).flip(-1).reshape(h.shape)
h[..., None].sin()[..., 0]
h.view(h.shape[0], -1).softmax(-1).view(h.shape) | h.reshape(h.size(0), -1).reshape(h.shape) | h.mT.contiguous().mT
h.view(h.shape[0], -1).cumsum(-1).view(h.shape) | h.swapaxes(1, 2).flatten(1).view_as(h) | h.expand(h.shape).clone()
h.unsqueeze(0).squeeze(0) | h.reshape(*h.shape[:-1], 2, -1).transpose(-1, -2).reshape(h.shape) | h.ravel().view(h.shape)
F.pad(h, (1, 1))[..., 1:-1] | F.pad(h, (0, 0, 1, 0))[:, :-1] | h.unfold(-1, 2, 2).sum(-1).repeat_interleave(2, -1)
h[..., ::2].repeat_interleave(2, -1) | h[:, -1:] + h | h[..., -1:] * h | h[..., :1] + h
h[:, ::2].mean(1, keepdim=True) * h
torch.cat([h[..., : h.shape[-1] // 2].sin(), h[..., h.shape[-1] // 2 :]], -1)
torch.stack([h[:, i] for i in range(h.shape[1])], 1)
""".replace("\n", " | ")

PRODUCTS = """
torch.einsum("bsf,btf->bst", h, h) @ h | h @ h.transpose(1, 2) @ h * 0.1 | torch.einsum("bsf,bsf->bsf", h, h)
torch.einsum("bsf->bs", h)[..., None] * h | torch.bmm(h, h.mT).softmax(-1) @ h | (h.mT @ h).mul(0.1).matmul(h.mT).mT
F.linear(h, torch.eye(h.shape[-1], dtype=h.dtype)) | h @ torch.ones(h.shape[-1], h.shape[-1], dtype=h.dtype) * 0.1
torch.tril(torch.ones(h.shape[1], h.shape[1], dtype=h.dtype)) @ h | F.layer_norm(h, h.shape[-1:])
F.rms_norm(h, h.shape[-1:])
F.layer_norm(h, (h.shape[-1],), eps=0.1) | F.group_norm(h.transpose(1, 2), 2).transpose(1, 2)
F.scaled_dot_product_attention(h, h, h)
F.avg_pool1d(h, 3, 1, 1) | F.avg_pool1d(h.mT, 3, 1, 1).mT | F.max_pool1d(h.mT, 3, 1, 1).mT
F.glu(torch.cat([h, h], -1), -1)
F.cosine_similarity(h, h + 1, dim=-1)[..., None] * h | torch.cdist(h, h) @ h * 0.1
F.interpolate(h.mT, scale_factor=2).mT[:, ::2]
""".replace("\n", " | ")

# With the stream beside it, or with sizes and numbers made of sizes.
MIXED = """
h * x.mean(-1, keepdim=True) | h + x.sum(-1, keepdim=True) | h * x[..., :1] | h + x[:, :1, :1]
torch.tanh(x).mean((1, 2), keepdim=True) + h
h * x.softmax(-1)[..., -1:] | h / h.shape[-1] | h * h.shape[1] | h + torch.ones(h.shape[-1], dtype=h.dtype)
h * float(h[0].numel())
h + torch.arange(h.shape[1], dtype=h.dtype)[:, None] | h.sin() if h.shape[1] > 2 else h
h.sin() if h.shape[-1] > 8 else h
h * torch.linspace(0, 1, h.shape[1], dtype=h.dtype)[:, None] | h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype)
h + torch.cat([x, x], -1) | h * x.repeat(1, 1, 2) | h + F.pad(x, (0, h.shape[-1] - x.shape[-1]))
h * x.norm(dim=(1, 2), keepdim=True) * 0.1
h * (x.detach() > 0).any(-1, keepdim=True) | torch.where(x[..., :1] > 0, h, h.sin())
h.masked_fill(x[..., :1] < 0, 0.0)
h + x.argmax(-1, keepdim=True) | h * (h.shape[-1] == 16) | h + (x @ x.mT).mean(-1, keepdim=True) | h * len(h[0])
""".replace("\n", " | ")

# Statements.
IN_PLACE = """
h = h.clone(); h[..., 0] = 0 | h = h.clone(); h[:, 0] = 0 | h = h * 1; h.mul_(0.5)
h = h + 0; h.add_(x.mean((1, 2), keepdim=True))
h = h.clone(); h[:, 1:] += h[:, :-1].clone() | h = h + 0; h.clamp_(min=0) | h = h * 1; h[h < 0] = 0
out = torch.zeros_like(h); out[:] = h.sin(); h = out | out = torch.empty_like(h); out.copy_(h); h = out * 2
out = h.new_zeros(h.shape); out[..., : h.shape[-1] // 2] = h[..., : h.shape[-1] // 2]; h = h + out
parts = []; [parts.append(p.sin()) for p in h.split(1, 1)]; h = torch.cat(parts, 1)
a, b = h.chunk(2, -1); h = torch.cat([a * torch.sigmoid(b), b], -1) | a, b = h.chunk(2, 1); h = torch.cat([b, a], 1)
(h,) = torch.broadcast_tensors(h) | h = sum(h * k for k in range(3))
h = h.sin(); h = h + h.detach().mean(1, keepdim=True)
""".replace("\n", " | ")

# The number of features, as forwards ask for it.
WIDTHS = """
h.shape[-1] | h.size(-1) | h.size()[2] | len(h[0, 0]) | int(h.shape[-1]) | h[0].numel() // h.shape[1] | h.stride(1)
h.shape[2:].numel() | math.prod(h.shape[2:]) | sum(h.shape[2:]) | max(h.shape[-1], 1) | min(h.shape[2:])
round(h.shape[-1])
2 * (h.shape[-1] // 2) | -(-h.shape[-1] // 1) | sum(divmod(h.shape[-1], 1)) | x.shape[-1] * 2
operator.index(h.size(2))
abs(h.shape[-1]) | math.floor(h.shape[-1] / 1) | torch.numel(h) // math.prod(h.shape[:2]) | [*h.shape][-1] | 16
torch.tensor(h.shape)[-1].item() | len(h.mT[0]) | int(f"{h.shape[-1]}") | self.up.out_features
self.up.weight.shape[0]
h.shape[-1] + h.shape[1] - x.shape[1] | math.isqrt(h.shape[-1] ** 2) | int(math.sqrt(h.shape[-1] ** 2))
h.shape[-1] ^ 0
""".replace("\n", " | ")

# What they do with it.
USES = """
h.reshape(-1, {n}).sin().view(*h.shape[:2], {n}) | h.view(*h.shape[:2], 2, {n} // 2).sin().flatten(2)
h.view(*h.shape[:2], {n} // 2, 2).flip(-1).reshape(h.shape) | h.unflatten(-1, ({n} // 2, 2)).softmax(-1).flatten(-2)
h.view(*h.shape[:2], {n} // 4, 4).softmax(-1).view(*h.shape[:2], {n}) | h[..., : {n}] * 2 | h.narrow(-1, 0, {n}).cos()
h / {n} | h / {n} ** 0.5 | h * math.sqrt({n}) | h * math.log2({n}) | h ** ({n} / {n}) | h * (1 - 1 / {n})
h % {n} + h
h if {n} > 8 else h.sin() | h.sin() if {n} % 2 == 0 else h.cos() | h.sin() if isinstance({n}, int) else h
h * bool({n})
h * len(f"{{{n}}}") | h * len("x" * {n}) | h * len([0] * {n}) | h * {{16: 2}}.get({n}, 3) | h * ({n} in (16, 32))
h * ({n} == h.shape[-1]) | h * sorted([{n}, 6])[0] | h + sum(range({n})) | h.sin() if {n} is not None and {n} else h
torch.cat(h.split({n} // 2, -1)[::-1], -1).sin() | torch.cat(h.split([{n} // 2, {n} - {n} // 2], -1), -1).sin()
torch.cat([h[..., i : i + 1] for i in range({n})], -1) | sum(h[..., i : i + 1] for i in range({n})) * h
torch.cat(h.chunk({n}, -1), -1) | torch.stack([h[..., i] * i for i in range({n})], -1) | h.roll({n}, -1)
h.roll({n} // 2, -1)
h + torch.zeros({n}, {on}) | h + torch.ones({n}, dtype=h.dtype, {on}) | h * torch.arange({n}, {on})
h + torch.full([1], {n}, {on}) | h + h.new_ones({n})
h + h.new_zeros(h.shape[0], h.shape[1], {n}) | h + torch.tensor({n}) | h * torch.tensor([1.0, {n}])[0]
h + torch.tensor([{n}])
h + torch.empty_like(h).fill_({n}) | h @ torch.eye({n}, dtype=h.dtype, {on})
h.expand(h.shape[0], h.shape[1], {n}) + 1
h.as_strided(h.shape, h.stride()).sin() | h.sin() if h.is_contiguous() else h | h.mT.reshape(len(h), {n}, -1).mT.sin()
F.pad(h, (0, {n}))[..., : {n}] | h.repeat(1, 1, {n} // {n}) | F.layer_norm(h, ({n},))
F.rms_norm(h, [{n}], eps=1 / {n})
F.dropout(h, 0 * {n}) | h.clamp(max={n} / 32) | h.cumsum(-1) / {n} | h - h.sum(-1, keepdim=True) / {n}
h.softmax(-1) * {n}
rearrange(h, "b s (g f) -> b s g f", f={n} // 4).sin().flatten(2) | rearrange(h, "b s (g f) -> b s (f g)", g=2).sin()
rearrange(h, "b s (f g) -> b s f g", f={n} // 2).softmax(-1).flatten(2)
repeat(h.mean(-1), "b s -> b s f", f={n}) + h
F.linear(h, torch.ones({n}, {n}, dtype=h.dtype, {on})) / {n} | F.avg_pool1d(h, {n} // {n})
torch.linspace(0, 1, {n}, {on}) * h
F.scaled_dot_product_attention(h, h, h, scale={n} ** -0.5) | h.index_fill(-1, torch.tensor([0], {on}), {n})
h.index_select(-1, torch.arange({n}, {on})) | h[..., torch.arange({n}, {on})].sin() | h[..., [*range({n})]]
h.view(len(h), -1, {n}).sin()
h.sum(-1, keepdim=True).expand(-1, -1, {n}) * 0.1 | h.masked_fill(torch.arange({n}, {on}) >= {n}, 0.0)
h * h.new_tensor({n})
h.where(torch.ones({n}, dtype=torch.bool, {on}), h.sin()) | h.view(torch.Size([*h.shape[:2], {n}])).sin()
torch.broadcast_to(h.mean(-1, True), (*h.shape[:2], {n})) + h | h.tile((1, 1, {n} // {n}))
h.unfold(-1, {n}, 1).sum(-2)
""".replace("\n", " | ")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(" | ") if entry.strip())


ORDINARY = tuple(f"h = {entry}" for entry in _listed(ELEMENTWISE))
ANY = (
    *(f"h = {entry.format(d=d)}" for entry in _listed(ALONG) for d in (1, -1)),
    *(f"h = {entry}" for text in (SHAPES, PRODUCTS, MIXED) for entry in _listed(text)),
    *(entry.replace("; ", "\n") for entry in _listed(IN_PLACE)),
)
SIZES = tuple(f"h = {use.format(n=n, on='device=h.device')}" for use in _listed(USES) for n in _listed(WIDTHS))
# Of the positions alone: right on any mesh.
POSITIONS = tuple(f"h = {entry.format(d=1)}" for entry in _listed(ALONG))
