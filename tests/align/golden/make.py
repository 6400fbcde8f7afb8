"""Write the golden files again: `python -m tests.align.golden.make`. No test runs `main`.

Run it only after a deliberate change of the alignment, and review the diff.
"""

import json
from pathlib import Path
from typing import Any

from teachonce.align import FlatText, Tokens, VocabularyMap, align_match, align_reduce, align_span
from tests.align.support import encode, tokenizer, vocabulary_map

FOLDER = Path(__file__).parent
KINDS = ("wordpiece-lower", "bpe-untrimmed", "unigram")
TEXTS = (
    "The student's Story, told again.", "", "Ученик учился; ёжик слушал.",
    "Žiak, cafe\u0301 a café: e\u0301\u0323!", "👩‍👩‍👧 and ❤️ — 猫 1,204",
    "soft\u00adhyphen  zero\u200bwidth\n½ ﬁne İstanbul",
)  # fmt: skip


def alignments_of(
    text: FlatText, sides: tuple[Tokens, Tokens], vocabulary: VocabularyMap, max_length: int
) -> dict[str, Any]:
    """Return the result of every alignment, as JSON."""
    reduced = align_reduce(sides[0], vocabulary, max_length)
    found = {
        "match": align_match(text, *sides, vocabulary),
        "span": align_span(text, *sides),
        "reduce": reduced.alignment,
    }
    return {name: [a.teacher.tolist(), a.student.tolist()] for name, a in found.items()} | {
        "reduce_max_length": max_length,
        "reduced_ids": reduced.tokens.ids.tolist(),
        "reduced_start": reduced.tokens.start.tolist(),
        "reduced_unknown": reduced.unknown.tolist(),
    }


def main() -> None:
    text = FlatText.of(TEXTS)
    tokens = {kind: encode(kind, TEXTS) for kind in KINDS}
    names = ("ids", "offsets", "special", "start")
    content: dict[str, object] = {
        "texts": TEXTS,
        "tokens": {
            kind: {name: getattr(side, name).tolist() for name in names}
            for kind, side in tokens.items()
        },
        "alignments": [
            {"teacher": t, "student": s}
            | alignments_of(text, (tokens[t], tokens[s]), vocabulary_map(t, s), 16)
            for t in KINDS
            for s in KINDS
            if t != s
        ],
    }
    for kind in KINDS:
        settings = json.dumps(json.loads(tokenizer(kind).to_str()), ensure_ascii=False)
        (FOLDER / f"{kind}.json").write_text(settings + "\n", encoding="utf-8")
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in content.items()
    )
    (FOLDER / "alignments.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
