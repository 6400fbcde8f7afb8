"""The model card of a student: how it came to be, for a person and for the hub."""

from __future__ import annotations

from typing import Any


def model_card(report: dict[str, Any]) -> str:
    """Markdown with the settings, the teacher and the held-out results of a finished student."""
    settings, result = report["settings"], report["result"]
    teacher = report["store"]["identity"]["teacher"]
    rows = "\n".join(
        f"| {name} | {_told(value)} |" for name, value in settings.items() if value is not None
    )
    results = "\n".join(f"| {name} | {_told(value)} |" for name, value in result.items())
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
base_model: {teacher["id"]}
tags: [distillation, teachonce]
---

# Student of {teacher["id"]}

A masked language model of {result["parameters"]:,} parameters, trained by teachonce from a store of
what its teacher knew (weights hash `{teacher["weights_hash"][:16]}`), with no teacher in memory.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

## Held-out results

| measure | value |
|---|---|
{results}

`valid_mlm` and `valid_kl` are in nats, `valid_hidden` in squared deviations of a channel;
`valid_mlm_per_character` divides the masked-LM loss by the characters that the masked tokens cover.

## Settings

| option | value |
|---|---|
{rows}
"""


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {weight:g}" for key, weight in value.items())
    return str(value)
