"""`Policy.local_sizes` and `Policy.pad`: sizes of a rank in attributes of modules, and what is padded for them."""

from collections.abc import Collection, Mapping, Sequence

from shardfn.layout.plan_checks import Draft, ParamRule
from shardfn.layout.policy import matches
from shardfn.notation import Factor, ShardError, Spec, parse, unknown_axes


def decide_local_sizes(draft: Draft, rules: Mapping[str, ParamRule]) -> dict[str, dict[str, int]]:
    """Module -> attribute -> its size on one rank. What rules split has been checked with the rules."""
    sizes: dict[str, dict[str, int]] = {}
    patterns, compute = draft.policy.local_sizes, draft.role.compute
    factors = [factor for spec, _ in rules.values() for factor in spec.factors if not factor.optional]
    split = {(factor.name, tuple(axis for axis in factor.axes if axis in compute)) for factor in factors}
    draft.check_patterns("Policy.local_sizes:", patterns, "module")
    for pattern, attribute, text in ((p, name, text) for p, texts in patterns.items() for name, text in texts.items()):
        try:
            size = _local_size(draft, text, split)
        except ShardError as error:
            draft.problems.append(f"Policy.local_sizes[{pattern!r}][{attribute!r}]: {error}")
            continue
        for module in draft.info.modules:
            if size is not None and matches(pattern, module.name):
                sizes.setdefault(module.name, {}).setdefault(attribute, size)  # the first match wins
    return sizes


def _local_size(draft: Draft, text: str, split: Collection[tuple[str, tuple[str, ...]]]) -> int | None:
    """A product or a ratio of two; None when it does not divide, which the rules that split it alike say too."""
    terms = _terms(text)
    for factor in (factor for spec in terms for factor in spec.factors):
        size = _padded_size(draft, factor)
        if size is not None and size % draft.ways(factor) and (factor.name, factor.axes) in split:
            return None
    local = [_local_product(draft, spec) for spec in terms]
    if len(local) == 1:
        return local[0]
    if pair := _paired(terms):
        _check_pair(draft, *pair)
    ratio, rest = divmod(local[0], local[1])
    if rest:
        raise ShardError(f"{' / '.join(map(str, local))} is no whole number")
    return ratio


def _terms(text: str) -> list[Spec]:
    """Both sides of a ratio, or one product."""
    cut = f"{text}/".index("/")
    return [parse(text, span) for span in [(0, cut), (cut + 1, len(text))][: 1 + text.count("/")]]


def _paired(terms: Sequence[Spec]) -> tuple[Factor, Factor] | None:
    """The factors of a ratio such as `heads@tp / kv@tp?`: so many of the first belong to each of the second."""
    if [len(spec.factors) for spec in terms] != [1, 1]:
        return None
    (over,), (under,) = (spec.factors for spec in terms)
    # A number divides every rank's size alike.
    return None if under.name.isdecimal() and not under.axes else (over, under)


def _check_pair(draft: Draft, over: Factor, under: Factor) -> None:
    """Padding comes last, so that only equal ratios leave each group on the rank of what it belongs to.

    Raises:
        ShardError: on some rank groups would meet what belongs to others.
    """
    many, few = (draft.sizes.get(factor.name) or 0 for factor in (over, under))
    stored = [_padded_size(draft, factor) or 0 for factor in (over, under)]
    ways = draft.ways(under)
    if stored[1] % ways == 0:
        fits = stored[0] * few == many * stored[1] or stored == [many, few]
    else:  # ranks share one, which is stored without padding
        fits = few == 1 or (stored[0] == many and ways % few == 0)
    if not fits:
        said = [
            f"{factor.name}={size}" + (f" padded to {padded}" if padded != size else "")
            for factor, size, padded in zip((over, under), (many, few), stored, strict=True)
        ]
        why = f"over {ways} ranks: on some rank {over.name} would meet {under.name} of others"
        raise ShardError(f"{said[0]} and {said[1]} {why}. Write Policy(pad={padding_for(draft, under, ways)}).")


def padding_for(draft: Draft, factor: Factor, ways: int) -> dict[str, int]:
    """What to pad so that a factor divides; a ratio in `Policy.local_sizes` pads what belongs together alike."""
    for text in (text for texts in draft.policy.local_sizes.values() for text in texts.values()):
        try:
            pair = _paired(_terms(text))
        except ShardError:
            continue  # reported with its entry
        if pair is None or factor.name not in (pair[0].name, pair[1].name):
            continue
        over, under = pair
        many, few = (draft.sizes.get(each.name) or 0 for each in pair)
        if few == 1 and under.optional:
            return {over.name: ways}  # all ranks share it
        if few and many % few == 0:
            return {over.name: many // few * ways, under.name: ways}
    return {factor.name: ways}


def _padded_size(draft: Draft, factor: Factor) -> int | None:
    """The size of a named or numbered factor as it is stored, unpadded on one rank; None when no rule has the name."""
    size = draft.sizes.get(factor.name)
    return size if size is None or draft.ways(factor) == 1 else draft.padded(factor, size)


def _local_product(draft: Draft, spec: Spec) -> int:
    """The product of factors, each divided by the axes that split it; those with `?` have one element at least."""
    total = 1
    for factor in spec.factors:
        size = _padded_size(draft, factor)
        if size is None:
            raise ShardError(f"no rule has a dim named '{factor.name}'\n{spec.caret(factor.span)}")
        if unknown := unknown_axes(spec, draft.axes):
            raise ShardError(unknown[0])
        ways = draft.ways(factor)
        if size % ways and not factor.optional:
            why = f"{factor.name}={size} does not divide, {size} % {ways} = {size % ways}"
            raise ShardError(f"{why}\n{spec.caret(factor.span)}")
        total *= max(1, size // ways) if factor.optional else size // ways
    return total
