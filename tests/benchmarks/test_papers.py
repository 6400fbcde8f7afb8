"""The entries of each paper are valid, and the published plans run from the dump to the scores.

- The entries of each paper are valid: the commands accept the options, and claims name existing
  arms.
- The published plans, run from the dump to the scores with tiny texts and numbers.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import steps, zhao
from benchmarks.reproduce.costs import Size, given, student_cost
from benchmarks.reproduce.examples import PARTS
from benchmarks.reproduce.kolesnikova import HEADLINE, SUPERGLUE, full
from benchmarks.reproduce.mukherjee import SETS, file_name
from benchmarks.reproduce.papers import NAMES, sources
from benchmarks.reproduce.reproduction import key_of
from benchmarks.reproduce.source import FULL, OURS, SIZES, SMALL, TEACHER, Source
from benchmarks.reproduce.verdicts import FAILS, SPREAD, verdict
from teachonce.downstream.cli import main as score
from teachonce.downstream.options import AS_IS, DownstreamOptions
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.qa import QA
from teachonce.downstream.tasks.sts import SentenceSimilarity
from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech
from teachonce.support.errors import UserError
from teachonce.support.options import scoped
from tests.benchmarks.test_reproduce import in_this_process
from tests.end_to_end.support import ok, refused
from tests.making.dumps import LATIN_AND_CYRILLIC, write_corpus
from tests.making.models import Tokenizers

LANGUAGES = ("de", "sk")
MEASURES = {
    each.name: each.measures for each in (Classify, QA, SentenceSimilarity, Entities, PartsOfSpeech)
}
MEASURES["classify"] = {**MEASURES["classify"], "F1": "f1"}  # of two classes
LARGE = Size(parameters=1e8, width=768, layers=12, heads=12, pieces=50_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    named = [f"{language}.{part}.tsv" for language in LANGUAGES for part in PARTS]
    texts = [f"{name}.{part}.tsv" for name in ("sst2", "imdb") for part in ("all", *PARTS)]
    for name in ("all.tsv", "train.tsv", "dev.tsv", "glove.300d.txt", *named, *texts):
        (folder / name).touch()
    return folder


def every(data: Path) -> list[tuple[str, Source]]:
    return [
        (size, source)
        for name in NAMES
        for size in SIZES
        for source in sources(name, size, data, larger=True).values()
    ]


def test_all_words_of_a_source_are_understood(data: Path) -> None:
    for _, source in every(data):
        for arm in source.arms.values():
            assert student_cost([*source.words, *arm.words], 1.0, LARGE).flops >= 0
        for task in source.tasks:
            words = [word.replace("{seed}", "0") for word in task.words]
            found = given(score, [*words, "--model", "m", "--out", "o"])
            taken, as_is = (
                scoped(DownstreamOptions, found["task"]),
                scoped(DownstreamOptions, AS_IS),
            )
            known = taken & as_is if found.get("as_is") else taken - {"as_is"}
            assert found.keys() <= known | {"task"}


HEADERS = {
    "Kolesnikova et al. 2022": {  # Table 1
        "paraphrases": "F1", "sentiment": "F1 (weighted)", "": "Entity F1",
        "questions": "F1, EM",
    },
    "Mukherjee & Awadallah 2019": {  # 6.4, "accuracy was similar": all tables
        each: "accuracy" for each in (*SETS, "SST-2", "SNIPS intents")
    },
    "Zhao et al. 2021": {  # 4 and 6: "accuracy", "slot F1 score (Sang and Buchholz, 2000)"; GLUE
        "SST-2": "accuracy", "MNLI-m": "accuracy", "SNIPS intents": "accuracy",
        "SNIPS slots": "Entity F1", "MRPC": "F1",
    },
    "The SlovakBERT thesis": {  # Table 5.1
        "NER": "Macro-F1", "POS": "Macro-F1", "STS": "Spearman", "BoolQ": "Accuracy",
    },
    "TinyMBERT": {  # 6: "phrase-level evaluation"; Table 7
        "": "Entity F1", "SST-2": "accuracy", "IMDB": "accuracy",
    },
}  # fmt: skip
"""The figure of each task as the heading of its source's table has it, copied from the sources."""
PUBLISHED_HEADERS = HEADERS | {
    "Kolesnikova et al. 2022": {  # Tables 1 and 2
        "ParaPhraser": "F1", "RuSentiment": "F1 (weighted)", "Collection-3": "Entity F1",
        "SberQuAD": "F1, EM", "Russian SuperGLUE": "Score",
    },
}  # fmt: skip
"""The same for the data sets of the published figures."""
NAMED = {
    "F1": "F1", "F1 (weighted)": "weighted F1", "Entity F1": "entity F1", "accuracy": "accuracy",
    "Accuracy": "accuracy", "Macro-F1": "macro F1", "Spearman": "Spearman", "EM": "exact match",
    "Score": "score",
}  # fmt: skip
NO_FIGURE = {SPREAD, "latency"}


def of_headers(headers: dict[str, dict[str, str]], name: str) -> set[str]:
    """Return the columns of a source: each data set with the figure in its table's header."""
    return {
        f"{data} {NAMED[figure]}".strip()
        for data, figures in headers[name].items()
        for figure in figures.split(", ")
    }


def test_a_column_shows_the_figure_that_the_papers_table_names(data: Path) -> None:
    found = set()
    for _, source in every(data):
        (name,) = (each for each in HEADERS if source.title.startswith(each))
        for task in source.tasks:
            kind = task.words[task.words.index("--task") + 1]
            assert key_of(task.figure, MEASURES[kind])
            assert task.measure == f"{task.data} {task.figure}".strip()
            found.add((name, task.data, task.figure))
    assert found == {
        (name, data, NAMED[figure])
        for name, tasks in HEADERS.items()
        for data, figures in tasks.items()
        for figure in figures.split(", ")
    }
    with pytest.raises(UserError, match=r"'F2': the task's figures are accuracy, macro F1"):
        key_of("F2", MEASURES["classify"])


def test_a_published_column_names_the_figure_of_its_table(data: Path) -> None:
    seen = set()
    for _, source in every(data):
        (name,) = (each for each in HEADERS if source.title.startswith(each))
        whole = source.published.columns
        columns = {each.partition(", ")[0] for each in whole} - NO_FIGURE
        assert columns and columns <= of_headers(PUBLISHED_HEADERS, name), source.title
        seen.add(name)
        if name.startswith("Kolesnikova"):
            assert columns == of_headers(PUBLISHED_HEADERS, name)
        elif name.startswith("Zhao"):  # no figure as such is in our copy
            assert all(re.search(", (difference to mixed|relative)$", each) for each in whole)
        elif name.startswith("Mukherjee") and len(columns) > 1:  # few labels: rows of BERT Large
            few = source.published.rows["stagewise"]
            assert few in ((90.45, 89.08, 91.00, 98.94), ("", 87.84, 90.14, ""))  # Tables 10, 11
            assert source.published.rows["stagewise, all labels"] == (92.33, 91.22, 93.55, 99.10)
    assert seen == HEADERS.keys()


def test_no_claim_fails_by_the_figures_of_its_paper(data: Path) -> None:
    """Claims about an average over data sets, each of which is a source, are judged by the mean."""
    judged = set()
    for _, source in every(data):
        (name,) = (each for each in HEADERS if source.title.startswith(each))
        rows, columns = source.published.rows, source.published.columns
        for claim in source.claims:
            both = [rows.get(row, ()) for row in claim.rows or (claim.better, claim.worse)]
            cells = [
                (float(better), float(worse))
                for column, better, worse in zip(columns, *both, strict=False)
                if column not in NO_FIGURE and column in (claim.columns or columns)
                if "" not in (better, worse)
            ]
            of_one = "(on average in the paper)" in claim.says and len(cells) == 1
            if not cells or of_one:
                continue
            if claim.average or "(on average in the paper)" in claim.says:
                cells = [tuple(map(mean, zip(*cells, strict=True)))]
            percent = replace(claim, near=claim.near and 100 * claim.near)
            for better, worse in cells:
                assert verdict(percent, [better], [worse])[0] != FAILS, (source.title, claim.says)
                judged.add(name)
    assert judged == HEADERS.keys()


def test_the_best_is_compared_with_every_row_of_its_table(data: Path) -> None:
    """Kolesnikova et al. 2022, Table 1: distil-tiny30 has twelve rows."""
    for source in (full(data)["kolesnikova"], *sources("kolesnikova", SMALL, data).values()):
        rivals = [claim.worse for claim in source.claims if "is the best" in claim.says]
        assert len(rivals) == len(set(rivals)) == 11 and source.best not in rivals
        assert all(
            claim.worse in claim.says for claim in source.claims if "is the best" in claim.says
        )
        says = [claim.says for claim in source.claims]
        assert len(says) == len(set(says))


def test_tasks_of_russian_superglue_match_the_folder(tmp_path: Path) -> None:
    """Kolesnikova et al. 2022, Table 2: RCB F1, LiDi Mcorr., the others Acc. but MuSeRC F1a."""
    named = {task.data: task.figure for task in SUPERGLUE}
    assert named.pop("RCB") == "macro F1" and named.pop("LiDiRus") == "Matthews"
    assert named.pop("MuSeRC") == "F1" and set(named.values()) == {"accuracy"}
    (source,) = full(tmp_path).values()
    assert not [task for task in source.tasks if task in SUPERGLUE]
    (tmp_path / "terra.test.tsv").touch()
    (source,) = full(tmp_path).values()
    assert [task.measure for task in source.tasks][5:] == ["TERRa accuracy"]
    of_table_2 = {task.measure for task in SUPERGLUE}
    for claim in source.claims:  # a claim about Table 1 is not judged by the tasks of Table 2
        assert {each in of_table_2 for each in claim.measures} == {"Table 2" in claim.where}


def test_claims_are_of_arms_and_measures_that_are_there(data: Path) -> None:
    for size, source in every(data):
        rows = {TEACHER, *source.models, *source.arms, *source.joined}
        assert source.best in source.arms and source.about and source.published
        assert size != SMALL or OURS in source.arms
        parts = [part for each in source.joined.values() for part in each.values()]
        assert set(parts) <= {*source.arms, *source.models}
        measures = {task.measure for task in source.tasks}
        optional = {task.measure for task in SUPERGLUE}  # in the user's folder, or not judged
        for claim in source.claims:
            elsewhere = {HEADLINE.better} if size == SMALL else set()  # no arm
            assert {claim.better, claim.worse} <= rows | elsewhere and claim.where
            assert set(claim.columns) <= set(source.published.columns)
            assert size != FULL or set(claim.measures) <= measures | optional
        assert any(measures & set(claim.measures or measures) for claim in source.claims)
        for cells in source.published.rows.values():
            assert len(cells) == len(source.published.columns)


SENTENCES = LATIN_AND_CYRILLIC
SCALE = 1e-5
WIDTH, LAYERS = 312, 12  # width of the published BiLSTM's embeddings, and 12 layers to cut from
COUNTS = {"train": 24, "dev": 8, "test": 8}
ARMS = {  # by table
    "kolesnikova": ("none", "KL+MSE RF"),
    "mukherjee-ag_news": ("hard", "stagewise", "stagewise, of Large"),
    "mukherjee-imdb-500": ("none", "stagewise"),
    "mukherjee-imdb-100": ("hard",),
    "zhao": ("mixed", "NoKD"),
    "zhao-vocabularies": ("mixed, 7k", "5k teacher, vanilla"),
    "zhao-snips": ("mixed, 96", "NoKD, 192"),
    "slovakbert": ("1", "2", "6"),
    "tinymbert": ("D0-S", "D4.2"),
    "tinymbert-100": ("D4.2", "D4.2, gold sentences alone"),
    "tinymbert-settings": (
        "D4.2, dropout 0.1", "D4.2, layer 2", "D4.2, the pre-trained teacher's embeddings",
        "D4.2, GloVe",
    ),
    "tinymbert-sizes": ("BiLSTM 50,100", "transformer 48x2"),
    "tinymbert-imdb": ("D4.2", "D4.2, of Large"),
    "tinymbert-imdb-500": ("none", "D4.2"),
}  # fmt: skip
SOURCES = sorted({table.partition("-")[0] for table in ARMS})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Tokenizers) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    folder, tokenizer = tmp_path_factory.mktemp("teacher"), make_tokenizer("wordpiece")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=12, intermediate_size=32, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def texts(count: int, columns: tuple[str, ...], labels: tuple[str, ...]) -> str:
    chance = random.Random(count)
    rows = [
        "\t".join([*(chance.choice(SENTENCES) for _ in columns), labels[number % len(labels)]])
        for number in range(count)
    ]
    return "\n".join(["\t".join([*columns, "score" if "0.5" in labels else "label"]), *rows]) + "\n"


def words(count: int, tags: tuple[str, ...], tagged: int = 10**6) -> str:
    lines = []
    for number in range(count):
        for place, word in enumerate(SENTENCES[number % len(SENTENCES)].split()):
            tag = tags[(number + place) % len(tags)] if number < tagged else ""
            lines.append(f"{word}\t{tag}")
        lines.append("")
    return "\n".join(lines) + "\n"


def questions(count: int) -> str:
    paragraphs = [
        {"context": text, "qas": [{
            "id": str(number), "question": "?",
            "answers": [{"text": text.split()[0], "answer_start": 0}],
        }]}
        for number, text in enumerate((SENTENCES * count)[:count])
    ]  # fmt: skip
    return json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]})


@pytest.fixture(scope="module")
def folders_of_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a folder of data for each source."""
    found = {name: tmp_path_factory.mktemp(name) for name in SOURCES}
    for name in ("kolesnikova", "zhao", "slovakbert"):
        write_corpus(found[name] / "corpus.txt", 60)
    one, two, tags = ("text",), ("text_a", "text_b"), ("O", "B-LOC", "B-PER")
    for part, count in COUNTS.items():
        kinds = {
            "kolesnikova/paraphraser.tsv": texts(count, two, ("yes", "no")),
            "kolesnikova/rusentiment.tsv": texts(count, one, ("good", "bad", "skip")),
            "kolesnikova/collection3.tsv": words(count, tags),
            "kolesnikova/sberquad.json": questions(count),
            **{f"zhao/{name}.tsv": texts(count, one, ("a", "b")) for name in ("sst2",
                                                                              "snips_intents")},
            **{f"zhao/{name}.tsv": texts(count, two, ("a", "b")) for name in ("mnli", "mrpc")},
            "zhao/snips_slots.tsv": words(count, tags),
            "slovakbert/wikiann.tsv": words(count, tags),
            "slovakbert/ud.tsv": words(count, ("NOUN", "VERB")),
            "slovakbert/stsb.tsv": texts(count, two, ("0.5", "4", "2")),
            "slovakbert/boolq.tsv": texts(count, two, ("yes", "no")),
            **{f"tinymbert/{name}.tsv": words(count, tags) for name in LANGUAGES},
            "tinymbert/.tsv": words(count, tags),
        }  # fmt: skip
        for called in SETS:
            name = file_name(called)
            gold = texts(16, one, ("a", "b"))
            whole = gold + "".join(f"{text}\t\n" for text in SENTENCES * 8)
            for source in ("mukherjee", "tinymbert"):
                kinds[f"{source}/{name}.tsv"] = texts(count, one, ("a", "b"))
                (found[source] / f"{name}.all.tsv").write_text(whole, "utf-8")
        for path, text in kinds.items():
            source, _, file = path.partition("/")
            name, _, ending = file.rpartition(".")
            file = f"{name}.{part}.{ending}".lstrip(".")
            (found[source] / file).write_text(text, "utf-8")
    (found["tinymbert"] / "all.tsv").write_text(words(40, tags, tagged=16), "utf-8")
    vectors = [" ".join([word, *["0.1"] * 300]) for word in ("the", "of")]
    for source in ("mukherjee", "tinymbert"):
        (found[source] / "glove.300d.txt").write_text("\n".join(vectors) + "\n")
    return found


def words_of_table(table: str, teacher: Path, data: dict[str, Path]) -> list[str | Path | float]:
    """Return the words that run a table with tiny numbers: its arms in ARMS, with one seed."""
    name = table.partition("-")[0]
    asked = [word for arm in ARMS[table] for word in ("--arm", arm)]
    return [
        name, "--size", "full", "--table", table, "--teacher", teacher, "--larger-teacher", teacher,
        "--data", data[name], "--scale", SCALE, "--seeds", 1, *asked,
    ]  # fmt: skip


@pytest.mark.parametrize("table", ARMS)
def test_the_published_plan_is_reported(
    table: str, tmp_path: Path, teacher: Path, folders_of_sources: dict[str, Path]
) -> None:
    work = tmp_path / "work"
    printed = ok(
        reproduce.main,
        *words_of_table(table, teacher, folders_of_sources),
        "--work",
        work,
        "--dry-run",
    )
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    assert not work.exists()
    assert sum("student-train" in line for line in lines) == len(ARMS[table])
    if table == "kolesnikova":  # both figures of the questions come from one run
        assert printed.count("--task qa") == printed.count("--task ner") > 0
    assert not re.search("# about 0 minutes\ndownstream --task mlm", printed)


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_file_is_refused(name: str, tmp_path: Path, teacher: Path) -> None:
    words = ("--size", "full", "--teacher", teacher, "--data", tmp_path, "--work", tmp_path / "w")
    line = refused(reproduce.main, name, *words)
    assert f"--data {tmp_path}: there is no " in line and "README.md" in line
    line = refused(reproduce.main, name, *words, "--table", "9")
    assert f"--table 9: there are {name}" in line


@pytest.mark.apart
@pytest.mark.parametrize("table", ARMS)
def test_the_published_plan_runs(
    table: str,
    tmp_path: Path,
    teacher: Path,
    folders_of_sources: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "in_own_process", in_this_process)
    monkeypatch.setattr(zhao, "FROM_SCRATCH", ("--model", "scratch:bert:32x2x4"))
    results = tmp_path / "RESULTS.md"
    words = [*words_of_table(table, teacher, folders_of_sources), "--work", tmp_path / "work"]
    ok(reproduce.main, *words, "--results", results)
    said = results.read_text()
    assert all(f"\n| {arm} | " in said for arm in ARMS[table]) and "Published: " in said
    assert f"--size full --table {table} --arm " in said and f" --scale {SCALE}`" in said
    if table.startswith("mukherjee"):
        assert re.search(r"of its store: teacher 0\.\d{3} \(hard labels 0\.\d{3}\)", said)
    assert "# all 0 commands" in ok(reproduce.main, *words, "--dry-run")
