"""Reads which layers the options --hidden and --attention average, without torch."""

from __future__ import annotations

from teachonce.support.console import counted
from teachonce.support.errors import UserError

WORDS = ("mean", "mean:0", "groups:N", "layer:I")


def feature_words(spec: str, where: str = "") -> list[tuple[str, int]]:
    """Read `mean`, `mean:0`, `groups:3`, `layer:4` or a comma list as (kind, number) each; [] for
    `none`. The number of a mean is its first layer. An error begins with `where`.

    Raises UserError for an unknown word and for `none` with others.
    """
    words = [part.strip() for part in spec.split(",")]
    found = []
    for word in words if words != ["none"] else ():
        kind, _, number = word.partition(":")
        if word == "none":
            raise UserError(f"{where}{spec}: none beside others; leave it out")
        if word in ("mean", "mean:0"):
            found.append((kind, int(number or 1)))
        elif number.isdecimal() and (kind == "layer" or (kind == "groups" and int(number) > 0)):
            found.append((kind, int(number)))
        else:
            expected = f"expected {', '.join(WORDS)} or none"
            raise UserError(f"{where}{spec}: unknown feature {word!r}: {expected}")
    return found


def layer_groups(spec: str, layers: int, where: str = "") -> dict[str, list[int]]:
    """Return the names and layer numbers of a feature option, such as `mean`, `mean:0`, `groups:3`,
    `layer:4` or a comma list of them.

    Layers are counted from 1 (the first transformer layer) to `layers`; `layer:0` is the output of
    the embeddings. `mean` averages layers 1..L, `mean:0` the embeddings as well, `groups:N` cuts
    layers 1..L into N equal consecutive groups.

    Raises UserError for an unknown word, `none` with others, a layer that does not exist or
    groups that do not divide the layers.
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
        else:
            if number > layers:
                raise UserError(
                    f"{where}layer:{number}: the teacher has layers 0 (embeddings) to {layers}"
                )
            groups[f"layer{number}"] = [number]
    return groups
