"""Write the golden files again: `python -m tests.align.golden.make`. No test runs this module.

Run it only after a deliberate change of the alignment, and review the diff.
"""

from __future__ import annotations

import json
from pathlib import Path

from teachonce.align import FlatText, align_match, align_reduce, align_span
from tests.align.support import encode, tokenizer, vocabulary_map

FOLDER = Path(__file__).parent
KINDS = ("wordpiece-lower", "bpe-untrimmed", "unigram")
TEXTS = (
    "The student's Story, told again.", "", "Ученик учился; ёжик слушал.",
    "Žiak, cafe\u0301 a café: e\u0301\u0323!", "👩‍👩‍👧 and ❤️ — 猫 1,204",
    "soft\u00adhyphen  zero\u200bwidth\n½ ﬁne İstanbul",
)  # fmt: skip


def main() -> None:
    text = FlatText.of(TEXTS)
    tokens = {kind: encode(kind, TEXTS) for kind in KINDS}
    content: dict[str, object] = {"texts": TEXTS, "tokens": {}, "alignments": []}
    content["tokens"] = {
        kind: {
            "pieces": [tokenizer(kind).id_to_token(i) for i in side.ids.tolist()],
            "ids": side.ids.tolist(),
            "offsets": side.offsets.tolist(),
            "special": side.special.tolist(),
            "start": side.start.tolist(),
        }
        for kind, side in tokens.items()
    }
    alignments = []
    for teacher, student in ((t, s) for t in KINDS for s in KINDS if t != s):
        vocabulary = vocabulary_map(teacher, student)
        sides = tokens[teacher], tokens[student]
        reduced = align_reduce(sides[0], vocabulary, max_length=16)
        found = {
            "match": align_match(text, *sides, vocabulary),
            "span": align_span(text, *sides),
            "reduce": reduced.alignment,
        }
        runs = {name: [a.teacher.tolist(), a.student.tolist()] for name, a in found.items()}
        alignments.append(
            {
                "teacher": teacher,
                "student": student,
                **runs,
                "reduce_max_length": 16,
                "reduced_ids": reduced.tokens.ids.tolist(),
                "reduced_start": reduced.tokens.start.tolist(),
                "reduced_unknown": reduced.unknown.tolist(),
            }
        )
    content["alignments"] = alignments
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
