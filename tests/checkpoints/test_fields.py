"""Fields of a checkpoint's files are honoured, refused or harmless; others are listed.

- The first position equals the one that the models of transformers look up.
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoConfig, AutoModel

from teachonce.checkpoints.declared import AFTER_PADDING, first_position
from teachonce.checkpoints.field_checks import unlisted
from teachonce.checkpoints.fields import CONFIG, FIELDS, LENGTHS, SETTINGS
from teachonce.checkpoints.sentence_settings import SentenceSettings, apply_settings
from teachonce.store import open_store
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.teacher import VectorOptions
from tests.checkpoints.test_text_vectors import VECTORS, library, texts_of
from tests.end_to_end.support import ok, says
from tests.hub_server import asked_by_this_process, serving
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed, dense, mean_embedder, modules, pooling
from tests.making.stores import copied
from tests.making.texts import ENGLISH

ROOT = Path(__file__).parents[2]


def tables() -> str:
    """Render the list of fields as Markdown tables, one for each file."""
    blocks = []
    for file, entries in FIELDS.items():
        where = file if file.endswith(".json") else f"{file}, a module's config.json"
        lines = [f"### {where}", "", "| fields | treatment | by, or reason |", "|---|---|---|"]
        for each in entries:
            names = ", ".join(f"`{name}`" for name in each.names)
            note = f"{each.note}; {each.remedy}" if each.remedy else each.note
            lines.append(f"| {names} | {each.treatment} | {note} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def test_the_page_shows_the_list() -> None:
    page = (ROOT / "docs/fields.md").read_text("utf-8")
    shown = page.partition("<!-- fields -->\n")[2].partition("<!-- end of fields -->")[0]
    assert shown == tables(), "replace what is between the marks by `tables()`, above"


def test_a_field_is_listed_once() -> None:
    for file, entries in FIELDS.items():
        names = [name for fields in entries for name in fields.names]
        assert len(set(names)) == len(names), file
        assert all(fields.remedy for fields in entries if fields.treatment == "refused"), file


HOLDERS = ("config", "given", "settings", "self.config", "network.config")
"""Names of variables that hold the fields of a file."""


def fields_read(path: Path) -> set[str]:
    """Return the literal names that a module reads from a mapping of fields."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(name)), *_]
            ):
                pass
            case ast.Call(
                func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(name)), *_]
            ):
                pass
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))):
                pass
            case _:
                continue
        if ast.unparse(of) in HOLDERS:
            found.add(name)
    return found


def test_what_the_code_reads_is_listed() -> None:
    folders = (ROOT / "teachonce/checkpoints", ROOT / "teacher_dump/teacher")
    read = set[str]().union(*(fields_read(p) for folder in folders for p in folder.glob("*.py")))
    listed = {name for entries in FIELDS.values() for fields in entries for name in fields.names}
    assert read - listed == set()
    assert {"truncate_dim", "is_decoder", "truncation_side", "type_vocab_size"} <= read


@pytest.mark.parametrize("kind", ("bert", "xlmr", "deberta", "distilbert", "modernbert", "gpt2"))
def test_what_our_libraries_write_is_listed(tiny_teacher: Teachers, kind: str) -> None:
    """Every field that our libraries write is known, so the line on other fields is rare."""
    folder = tiny_teacher(kind)
    for file in (CONFIG, "tokenizer_config.json"):
        fields = json.loads((folder / file).read_text("utf-8"))
        assert unlisted(file, fields) == [], file
    assert not load_teacher(str(folder), head="none", attention="none").notes


def test_fields_that_nothing_reads_are_named_once(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = copied(tiny_teacher("bert"), tmp_path / "m")
    changed(folder, CONFIG, output_swirl=0.5, hidden_twist=2, architectures=["SwirlForMaskedLM"])
    changed(folder, "tokenizer_config.json", fold_hats=True)
    out = ok(
        *(teacher_dump, "--model", folder, "--corpus", texts_of(tmp_path / "a.txt")),
        *("--out", tmp_path / "a.zarr", "--device", "cpu"),
    )
    says(
        out,
        "config.json: output_swirl, hidden_twist: not in the list",
        "tokenizer_config.json: fold_hats: not in the list",
        "its class SwirlForMaskedLM is not in transformers, which loads it as BertConfig",
    )
    assert out.count("unread   ") == 3


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "positions": ({"position_embedding_type": "relative_key"}, "mlm",
                  "position_embedding_type is 'relative_key' in config.json: .* absolute"),
    "left to right": ({"is_decoder": True}, "auto", "is_decoder is true .*--head causal"),
    "another encoder": ({"is_decoder": True, "add_cross_attention": True}, "none",
                        "add_cross_attention is True in config.json"),
    "fewer layers": ({"num_hidden_layers": 3}, "mlm",
                     "its layers have 16 weights that BertForMaskedLM does not read, first bert"),
    "quantised": ({"quantization_config": {"quant_method": "swirl"}}, "mlm",
                  "quantization_config of its config.json names a method"),
    "code": ({"auto_map": {"AutoModel": "modeling_x.SwirlBertModel"}}, "mlm",
             "its class SwirlBertModel is Python code of its own .*--trust-remote-code"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_nobody_honours_are_refused(
    tiny_teacher: Teachers, tmp_path: Path, name: str
) -> None:
    fields, head, line = REFUSED[name]
    folder = changed(copied(tiny_teacher("bert"), tmp_path / "m"), CONFIG, **fields)
    with pytest.raises(UserError, match=line) as error:
        load_teacher(str(folder), head=head, attention="none")
    assert "\n" not in str(error.value)


def test_code_of_a_family_that_transformers_has_is_not_refused(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    folder = copied(tiny_teacher("bert"), tmp_path / "m")
    changed(folder, CONFIG, auto_map={"AutoConfig": "configuration_bert.BertConfig"})
    changed(folder, CONFIG, position_embedding_type="absolute")
    teacher = load_teacher(str(folder), attention="none")
    (note,) = teacher.notes
    assert teacher.head == "mlm" and note.startswith("config.json: auto_map, its own Python code")


@pytest.mark.parametrize(
    ("fields", "line"),
    (
        ({"id2label": {"0": "a", "2": "b"}, "label2id": {}}, r"has the numbers \[0, 2\], expected"),
        ({"label2id": {"a": 1, "b": 0}}, "'a' is number 0 in id2label .* and 1 in label2id"),
        ({"id2label": {"0": "a", "1": "a"}}, "two labels have the same name"),
    ),
)
def test_labels_have_one_number_each(
    tiny_teacher: Teachers, tmp_path: Path, fields: dict[str, Any], line: str
) -> None:
    teacher = tiny_teacher("bert", "classification", ("a", "b"))
    folder = changed(copied(teacher, tmp_path / "m"), CONFIG, **fields)
    with pytest.raises(UserError, match=line):
        load_teacher(str(folder), head="classification", attention="none")


@pytest.mark.parametrize(
    "fields", ({"return_dict": False}, {"chunk_size_feed_forward": 5}, {"architectures": "Bert"})
)
def test_fields_of_no_consequence(
    tiny_teacher: Teachers, tmp_path: Path, fields: dict[str, Any]
) -> None:
    plain = tiny_teacher("bert")
    folder = changed(copied(plain, tmp_path / "m"), CONFIG, **fields)
    ids = np.array([[2, 7, 8, 9, 10, 11, 3]])
    one, two = (
        load_teacher(str(each), head="mlm", hidden="mean", attention="none").run(
            ids, np.ones(ids.shape, bool)
        )
        for each in (plain, folder)
    )
    assert np.allclose(one.hidden["mean"], two.hidden["mean"], atol=1e-6)


def test_weights_that_are_no_numbers_of_the_network(tiny_teacher: Teachers, tmp_path: Path) -> None:
    key = "bert.encoder.layer.0.attention.self.query.weight"
    for name, line in (
        ("int8", f"{key} in model.safetensors holds whole numbers .I8."),
        ("adapter", "1 weights that BertForMaskedLM does not read, first bert.*lora_A"),
        ("sizes", "cannot be loaded: its weights have other sizes than its config.json declares"),
    ):
        folder = copied(tiny_teacher("bert"), tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        if name == "int8":
            weights[key] = (100 * weights[key]).to(torch.int8)
        elif name == "adapter":
            weights[key.replace("weight", "lora_A.default.weight")] = torch.ones(2, 32)
        else:
            weights[key] = weights[key][:8].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=line):
            load_teacher(str(folder), head="mlm", attention="none")


def test_whole_numbers_of_the_hub(
    tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tiny_teacher("bert"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    key = "bert.embeddings.word_embeddings.weight"
    weights[key] = (100 * weights[key]).to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with serving() as hub:
        asked_by_this_process(hub, monkeypatch, tmp_path / "home")
        hub.add("models/acme/mini", folder)
        with pytest.raises(UserError, match=f"acme/mini: {key} in .* holds whole numbers .I8."):
            load_teacher("acme/mini", head="mlm", attention="none")


@pytest.mark.parametrize("config", (True, False))
def test_an_adapter_is_no_model(tiny_teacher: Teachers, tmp_path: Path, config: bool) -> None:
    folder = copied(tiny_teacher("bert"), tmp_path / "m")
    changed(folder, "adapter_config.json", base_model_name_or_path="some/base", peft_type="LORA")
    if not config:
        (folder / CONFIG).unlink()
    with pytest.raises(UserError, match=r"an adapter of another model .*some/base.*; merge it"):
        load_teacher(str(folder), attention="none")


def test_layers_that_are_not_seen_are_not_averaged(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """A mean is refused if a layer does not run: OPT's LM model bypasses its base model."""
    from transformers import OPTConfig, OPTForCausalLM

    tokenizer = make_tokenizer("bpe-plain")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = OPTConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, word_embed_proj_dim=32, **sizes
    )
    OPTForCausalLM(config).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="layer 2 of the teacher ran 0 times"):
        load_teacher(str(tmp_path / "m"), head="causal", hidden="mean", attention="none")


Spoil = Callable[[Path], Any]
OF_VECTORS: dict[str, tuple[Spoil, str]] = {
    "no number": (lambda f: changed(f, SETTINGS, truncate_dim="8"), "truncate_dim is '8'"),
    "nothing left": (lambda f: changed(f, SETTINGS, truncate_dim=0), "truncate_dim is 0"),
    "unknown likeness": (
        lambda f: changed(f, SETTINGS, similarity_fn_name="swirl"),
        "similarity_fn_name is 'swirl' .*expected cosine, dot, euclidean, manhattan",
    ),
    "prompts": (
        lambda f: changed(f, SETTINGS, prompts=["query"]),
        "prompts is .* a string for each",
    ),
    "sparse": (lambda f: changed(f, SETTINGS, model_type="SparseEncoder"), "one dense vector"),
    "output": (
        lambda f: changed(
            f,
            LENGTHS,
            modality_config={"text": {"method": "forward", "method_output_name": "pooler_output"}},
        ),
        "declares output 'pooler_output'",
    ),
    "chat": (
        lambda f: changed(f, LENGTHS, modality_config={"text": {}, "message": {}}),
        "declares chat messages",
    ),
    "lengths of queries": (lambda f: changed(f, LENGTHS, query_length=8), "query_length is 8"),
    "arguments": (
        lambda f: changed(f, LENGTHS, config_args={"hidden_act": "relu"}),
        r"config_args is \{'hidden_act': 'relu'\} .*write them into config.json",
    ),
    "special tokens": (
        lambda f: changed(f, LENGTHS, processing_kwargs={"text": {"add_special_tokens": False}}),
        "processing_kwargs is .*add_special_tokens",
    ),
    "no table": (lambda f: changed(f, LENGTHS, model_args=7), "model_args is 7"),
    "no outputs": (lambda f: changed(f, LENGTHS, modality_config=7), "declares output 0"),
    "no modes": (
        lambda f: changed(f, "1_Pooling/config.json", pooling_mode=[]),
        "its modules do not fit together .modules.json.: torch.cat",
    ),
    "unknown default": (
        lambda f: changed(f, SETTINGS, default_prompt_name="swirl"),
        "default_prompt_name is 'swirl' .*give --prompt NAME, or --prompt '' for none",
    ),
    "new field": (
        lambda f: changed(f, "2_Normalize/config.json", order=1),
        "2_Normalize/config.json has order, which the installed Normalize does not read",
    ),
    "of tokens": (
        lambda f: changed(f, "2_Normalize/config.json", module_input_name="token_embeddings"),
        "module_input_name 'token_embeddings', expected 'sentence_embedding' after",
    ),
}


@pytest.fixture(scope="module")
def embedder(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mean_embedder(tiny_teacher("bert"), tmp_path_factory.mktemp("embedder") / "m")


def test_fields_of_vectors_that_nothing_reads_are_named(embedder: Path, tmp_path: Path) -> None:
    assert not load_teacher(str(embedder), head="embedding", attention="none").notes
    folder = copied(embedder, tmp_path / "m")
    for file in (SETTINGS, LENGTHS):
        changed(folder, file, swirl=0.5)
    listed = json.loads((folder / "modules.json").read_text("utf-8"))
    listed[1]["weight"] = 2
    (folder / "modules.json").write_text(json.dumps(listed))
    assert load_teacher(str(folder), head="embedding", attention="none").notes == [
        f"{SETTINGS}: swirl: not in the list of fields, so nothing reads it",
        f"{LENGTHS}: swirl: not in the list of fields, so nothing reads it",
        "modules.json: weight: not in the list of fields, so nothing reads it",
    ]


@pytest.mark.parametrize("name", OF_VECTORS)
def test_settings_of_vectors_that_are_refused(embedder: Path, tmp_path: Path, name: str) -> None:
    spoil, line = OF_VECTORS[name]
    folder = copied(embedder, tmp_path / "m")
    spoil(folder)
    with pytest.raises(UserError, match=line) as error:
        load_teacher(str(folder), head="embedding", attention="none")
    assert "\n" not in str(error.value)


def test_modules_that_do_not_fit_together(tiny_teacher: Teachers, tmp_path: Path) -> None:
    parts = (pooling("mean"), dense(32, 8), dense(9, 8))
    folder = modules(*parts, base=tiny_teacher("bert"), folder=tmp_path / "m")
    with pytest.raises(UserError, match="its modules do not fit together .*mat1 and mat2"):
        load_teacher(str(folder), head="embedding", attention="none")


def test_a_pooling_in_the_place_of_modules_is_said(embedder: Path) -> None:
    words = VectorOptions(pooling="cls")
    teacher = load_teacher(str(embedder), head="embedding", attention="none", vectors=words)
    assert teacher.notes == [
        "modules.json: --pooling cls replaces its modules, prompts and lengths"
    ]


HONOURED: dict[str, Spoil] = {
    "lower case": lambda f: changed(f, LENGTHS, do_lower_case=True),
    "arguments of no consequence": lambda f: changed(
        f, LENGTHS, model_args={"attn_implementation": "eager"}, unpad_inputs=False
    ),
    "dot": lambda f: changed(f, SETTINGS, similarity_fn_name="dot", __version__={}),
    "more than the tokenizer says": lambda f: changed(
        changed(f, "tokenizer_config.json", model_max_length=6), LENGTHS, max_seq_length=60
    ),
}


@pytest.mark.parametrize("name", HONOURED)
def test_settings_of_vectors_that_are_honoured(embedder: Path, tmp_path: Path, name: str) -> None:
    folder = copied(embedder, tmp_path / "m")
    HONOURED[name](folder)
    texts = (*ENGLISH[:6], "The OLD Stories Were LONG")
    corpus = texts_of(tmp_path / "a.txt", texts)
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    assert np.allclose(store.embeddings(), library(folder, list(texts)), atol=2e-6)


@pytest.mark.parametrize(
    "normalizer",
    (
        normalizers.Lowercase(),
        normalizers.BertNormalizer(),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    ),
)
def test_a_tokenizer_that_lower_cases_stays_as_it_is(
    make_tokenizer: Tokenizers, normalizer: normalizers.Normalizer
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    tokenizer.backend_tokenizer.normalizer = normalizer
    before = tokenizer.backend_tokenizer.to_str()
    apply_settings(tokenizer, SentenceSettings(lower_case=True))
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(
    "spoil",
    (
        lambda f: changed(f, LENGTHS, max_seq_length=9),
        lambda f: changed(f, LENGTHS, processing_kwargs={"text": {"max_length": 9}}),
        lambda f: changed(f, LENGTHS, tokenizer_args={"model_max_length": 9}),
        lambda f: changed(f, "tokenizer_config.json", model_max_length=9),
        lambda f: (
            (f / LENGTHS).unlink(),
            changed(f, "sentence_roberta_config.json", max_seq_length=9),
        ),
    ),
)
def test_the_longest_text_is_where_folders_have_it(
    embedder: Path, tmp_path: Path, spoil: Spoil
) -> None:
    from teachonce.teacher_dump.job.features import window_length

    folder = copied(embedder, tmp_path / "m")
    spoil(folder)
    teacher = load_teacher(str(folder), head="embedding", attention="none")
    assert window_length(None, teacher) == 9


SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
    "pad_token_id": 5,
}
OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 6},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 2, "shape_size": 4},
    "lilt": {"hidden_size": 24, "channel_shrink_ratio": 1},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 8},
    "markuplm": {"max_depth": 2, "xpath_unit_hidden_size": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
FROM_ZERO = {"bert", "distilbert", "electra"}


@pytest.mark.parametrize("kind", sorted(AFTER_PADDING | FROM_ZERO))
def test_the_first_token_takes_the_row_that_the_model_looks_up(kind: str) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **OWN.get(kind, {})})
    model = AutoModel.from_config(config).eval()
    seen: list[torch.Tensor] = []
    table = model.get_submodule("embeddings.position_embeddings")
    table.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    first = first_position(config.to_dict())
    assert seen[0].reshape(-1)[:4].tolist() == list(range(first, first + 4))
    assert (first == 0) == (kind in FROM_ZERO)


@pytest.mark.parametrize("kind", ["camembert", "roberta", "xlm-roberta"])
def test_the_padding_id_of_a_config_without_one_matches_transformers(kind: str) -> None:
    config = AutoConfig.for_model(kind).to_dict()
    assert config.pop("pad_token_id") == 1
    assert first_position(config) == 2
