"""What the tensors of a model are called in files, and what of them lies where. Layer 2.

A model of the transformers library may have other tensors than its files: one for all experts where a file has one for
each, say. Its own conversions say so. They are run here on patchworks, which have no values.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from shardfn._torch import init_of, names_left_out
from shardfn.core.errors import ShardError
from shardfn.core.pieces import Patchwork

Model = nn.Module | Mapping[str, Tensor]
Names = Callable[[str], str] | Mapping[str, str]
Shapes = Mapping[str, tuple[int, ...]]


def persistent_names(model: Model) -> list[str]:
    """The names of parameters and of buffers that a state dict has, tied ones under each name."""
    if not isinstance(model, nn.Module):
        return list(model)
    own = dict.fromkeys(name for name, _ in model.named_parameters(remove_duplicate=False))
    own |= dict.fromkeys(name for name, _ in model.named_buffers(remove_duplicate=False))
    return [name for name in model.state_dict() if name in own]


def wanted_from(model: object, stored: Shapes, names: Names | None) -> tuple[dict[str, Patchwork], list[str]]:
    """(name in the model -> what it is made of, names in the files that nothing is made of).

    Raises:
        ShardError: files of transformers whose conversion is none of stacking, joining, cutting and transposing.
    """
    known = persistent_names(model) if isinstance(model, nn.Module | Mapping) else []
    if names is None and _is_of_transformers(model):
        made, left = _converted(model, known, stored)
    else:
        called = {name: _called(names, name) for name in known}
        made = {name: Patchwork.of(file, stored[file]) for name, file in called.items() if file in stored}
        left = [name for name in stored if name not in set(called.values())]
    return made, [name for name in left if not is_ignored(model, "unexpected", name)]


def _called(names: Names | None, name: str) -> str:
    return name if names is None else names.get(name, name) if isinstance(names, Mapping) else names(name)


def is_ignored(model: object, why: Literal["missing", "unexpected"], name: str) -> bool:
    """Whether a model of transformers makes do without a tensor of its own in files, or with a further one in them."""
    patterns: Iterable[str] = names_left_out(model, f"load_{why}")
    if why == "unexpected" and _is_of_transformers(model):
        patterns = (*patterns, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # buffers that older files have
    return any(re.search(pattern, name) for pattern in patterns)


def _is_of_transformers(model: object) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def own_init(model: object) -> Callable[[Any], Any] | None:
    """How a model of transformers fills what its files do not have."""
    return init_of(model) if _is_of_transformers(model) else None


def _converted(model: Any, known: list[str], stored: Shapes) -> tuple[dict[str, Patchwork], list[str]]:
    """What `from_pretrained` makes of the tensors of files."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [x for x in transforms if isinstance(x, loading.WeightRenaming)]
    converters = [x for x in transforms if isinstance(x, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    have: dict[Any, Any] = dict.fromkeys(known, True)
    made: dict[str, Patchwork] = {}
    groups: dict[str, Any] = {}
    left = []
    for name in sorted(stored, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, have)
        if target not in have and name in have:
            target, pattern = name, None
        if target not in have:
            left.append(name)
        elif pattern is None:
            made[target] = Patchwork.of(name, stored[name])
        else:
            if target not in groups:
                groups[target] = deepcopy(by_pattern[pattern])
            groups[target].add_tensor(target, name, pattern, Patchwork.of(name, stored[name]))
    for target, converter in groups.items():
        made |= _run(converter, target, model)
    return made, left


def _run(converter: Any, target: str, model: Any) -> dict[str, Patchwork]:
    try:
        found = converter.convert(target, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in found.items()}
    except Exception as error:
        raise _not_followed(f"'{target}' from {converter.source_patterns} by {converter.operations}", error) from error


def _not_followed(what: str, error: Exception) -> ShardError:
    return ShardError(
        f"safetensors: transformers makes {what}, which cannot be done part by part ({error}). Load the model by "
        "from_pretrained on one rank and pass src= to shard; save it by save_pretrained."
    )


def files_of(model: Any, made: Mapping[str, Patchwork], names: Names | None) -> dict[str, Patchwork]:
    """(name in a file -> what of the model it is made of), in the order of a file, for the model's tensors `made`.

    Raises:
        ShardError: as in `wanted_from`; two tensors with one name.
    """
    if names is None and _is_of_transformers(model):
        from transformers.core_model_loading import revert_weight_conversion

        ignored = names_left_out(model, "save")
        kept: Any = {name: x for name, x in made.items() if name not in ignored}
        found: Any
        try:
            found = revert_weight_conversion(model, kept)
        except Exception as error:
            raise _not_followed(f"the tensors of files of a {type(model).__name__}", error) from error
        return found
    out: dict[str, Patchwork] = {}
    for name, patchwork in made.items():
        file = _called(names, name)
        if file in out:
            raise ShardError(f"save_safetensors: names gives '{file}' to two tensors, the second is '{name}'")
        out[file] = patchwork
    return out


def kept_name(model: object, names: tuple[str, ...]) -> str:
    """Under which of its names a tied tensor is written."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in tied), names[0])
