"""Parses --hidden and --attention into groups of layers, without torch."""

from __future__ import annotations

from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.parsing import whole_number

WORDS = ("mean", "mean:0", "groups:N", "layer:I")
BEFORE_NORM = "-before-norm"  # suffix of a name: the last layer's output before the final norm


def feature_words(spec: str, where: str = "") -> list[tuple[str, int]]:
    """Parse `mean`, `mean:0`, `groups:3`, `layer:4` or a comma-separated list of them into (kind,
    number) pairs; `none` gives []. The number of a mean is its first layer. `layer:4-before-norm`,
    which captures of other tools may have, is of kind `layer-before-norm`.

    Raises UserError, which begins with `where`, for an unknown word and for `none` with others.
    """
    words = [part.strip() for part in spec.split(",")]
    features = []
    for word in words if words != ["none"] else ():
        kind, _, text = word.partition(":")
        number, last = whole_number(text), whole_number(text.removesuffix(BEFORE_NORM))
        if word == "none":
            raise UserError(f"{where}{spec}: none cannot be combined with others; leave it out")
        if word in ("mean", "mean:0"):
            features.append((kind, 1 if number is None else 0))
        elif number is not None and (kind == "layer" or (kind == "groups" and number > 0)):
            features.append((kind, number))
        elif kind == "layer" and last is not None:
            features.append((kind + BEFORE_NORM, last))
        else:
            expected = f"expected {', '.join(WORDS)} or none"
            raise UserError(f"{where}{spec}: unknown feature {word!r:.60}: {expected}")
    return features


def layer_groups(spec: str, layers: int, where: str = "") -> dict[str, list[int]]:
    """Return the layer numbers of each feature that an option requests, by the feature's name.

    Layers are numbered from 1 (the first transformer layer) to `layers`; layer 0 is the output of
    the embeddings, and layer L + 1 the last layer before the final norm. `mean` averages layers
    1..L, `mean:0` layers 0..L, and `groups:N` divides layers 1..L into N equal consecutive groups.

    Raises UserError like `feature_words`, for a layer that does not exist, and if N does not divide
    the number of layers.
    """
    groups: dict[str, list[int]] = {}
    for kind, number in feature_words(spec, where):
        if kind == "mean":
            groups["mean" if number else "mean0"] = list(range(number, layers + 1))
        elif kind == "groups":
            if layers % number:
                raise UserError(
                    f"{where}groups:{number}: {counted(layers, 'layer')} cannot be cut into"
                    f" {number} equal groups; choose a divisor of {layers}"
                )
            size = layers // number
            for i in range(number):
                groups[f"groups{number}.{i}"] = list(range(1 + i * size, 1 + (i + 1) * size))
        elif kind == f"layer{BEFORE_NORM}" and number == layers:
            groups[f"layer{number}{BEFORE_NORM}"] = [layers + 1]
        else:
            if number > layers or kind != "layer":
                raise UserError(
                    f"{where}layer:{number}: the teacher has layers 0 (embeddings) to {layers};"
                    " give one of them"
                )
            groups[f"layer{number}"] = [number]
    return groups
