"""The comparison as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.demo.measure import Comparison


def show(comparison: Comparison) -> None:
    """The comparison as a table in the terminal."""
    teacher = comparison.models[0]
    table = Table(title="held-out text, CPU, speed from text to vector")
    table.add_column("model", no_wrap=True)
    for head in ("parameters", "MB", "sentences/s", "MLM loss", "Spearman"):
        table.add_column(head, justify="right")
    for model in comparison.models:
        faster = model.sentences_per_second / teacher.sentences_per_second
        smaller = teacher.parameters / model.parameters
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:.1f}M" + (f" (1/{smaller:.0f})" if smaller > 1 else ""),
            f"{model.megabytes:.1f}",
            f"{model.sentences_per_second:,.0f}" + (f" (x{faster:.0f})" if smaller > 1 else ""),
            "" if model.mlm is None else f"{model.mlm:.2f}",
            f"{model.agreement:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(legend(comparison.sentences), highlight=False)


def legend(sentences: int) -> str:
    """Explain the columns of the comparison."""
    pairs = sentences * (sentences - 1) // 2
    return (
        f"Spearman: between the teacher's and the model's cosines of all {pairs:,}"
        f" pairs of {sentences} paragraphs that were not dumped. A paragraph's vector is the mean"
        " over layers and tokens, less the mean of all paragraphs; the same for every model."
        " MLM loss: nats a masked token, on the held-out part of the store. Before training:"
        " cut out of the teacher's embeddings and layers; both students start there."
    )
