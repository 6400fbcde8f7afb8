"""Taps and heads equal plain transformers and a float64 reference, for every family of teachers.

- The taps and heads equal plain transformers, for every family of teachers.
- Values read from the logits equal a float64 reference.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM

from teachonce.store import open_store
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.features import window_length
from teachonce.teacher_dump.job.part_writing import _uniform
from teachonce.teacher_dump.teacher import heads
from teachonce.teacher_dump.teacher.heads import Decoder, log_partitions, top_logits
from teachonce.teacher_dump.teacher.layer_groups import layer_groups
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.masked_views import DrawKey
from teachonce.teacher_dump.windows.window import length_batches, padded
from tests.end_to_end.support import ROOT
from tests.making.dumps import dump_options
from tests.making.environment import printed_by
from tests.making.models import TEACHER_KINDS, Teachers, Tokenizers
from tests.making.texts import SENTENCES


def tokens(teacher: Teacher, count: int = 5) -> tuple[Array, Array]:
    encoded = teacher.tokenizer(SENTENCES[:count])["input_ids"]
    return padded([np.array(row) for row in encoded], teacher.tokenizer.pad_token_id)


@pytest.mark.parametrize("kind", TEACHER_KINDS)
def test_averages_maps_and_logits_match_transformers(tiny_teacher: Teachers, kind: str) -> None:
    folder = tiny_teacher(kind)
    teacher = load_teacher(
        str(folder), hidden="mean,mean:0,groups:2,layer:0,layer:4", attention="mean,groups:2"
    )
    assert not teacher.one_length
    assert not load_teacher(str(folder), precision="bf16").one_length
    ids, present = tokens(teacher)
    got = teacher.run(ids, present)

    plain = AutoModelForMaskedLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        want = plain(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(present).long(),
            output_hidden_states=True,
            output_attentions=True,
        )
    here = torch.from_numpy(present)
    states = [state[here] for state in want.hidden_states]
    close: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(got.hidden["mean"][here], torch.stack(states[1:]).mean(0), **close)
    torch.testing.assert_close(got.hidden["mean0"][here], torch.stack(states).mean(0), **close)
    torch.testing.assert_close(
        got.hidden["groups2.1"][here], torch.stack(states[3:]).mean(0), **close
    )
    torch.testing.assert_close(got.hidden["layer0"][here], states[0], **close)
    torch.testing.assert_close(got.hidden["layer4"][here], states[4], **close)
    maps = torch.stack([m.mean(1) for m in want.attentions])
    pairs = here[:, :, None] & here[:, None, :]
    torch.testing.assert_close(got.attention["mean"][pairs], maps.mean(0)[pairs], **close)
    torch.testing.assert_close(got.attention["groups2.0"][pairs], maps[:2].mean(0)[pairs], **close)

    logits = want.logits[here]
    assert teacher.decoder is not None and got.head_input is not None
    top = top_logits(teacher.decoder, got.head_input[here], 7)
    best, where, rest, partition = top.values()
    logprobs = logits.log_softmax(-1)
    np.testing.assert_allclose(partition, logits.logsumexp(-1), atol=1e-3)
    np.testing.assert_array_equal(best, logprobs.topk(7).indices)
    np.testing.assert_allclose(where, logprobs.topk(7).values, atol=1e-3)
    np.testing.assert_allclose(np.exp(where).sum(1) + np.exp(rest), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_a_checkpoint_without_a_head_is_refused_not_given_a_random_one(
    tiny_teacher: Teachers, tmp_path: Path, kind: str
) -> None:
    AutoModel.from_pretrained(tiny_teacher(kind)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_teacher(kind) / name).read_bytes())
    with pytest.raises(UserError, match="no masked-LM head.*--head none"):
        load_teacher(str(tmp_path), head="mlm")
    assert load_teacher(str(tmp_path), head="auto").decoder is None


def test_draws_match_numpy() -> None:
    key, shape = DrawKey(7, 1, 2**40), (5, 3)
    drawn = np.random.default_rng([*key, 1]).random(shape)
    np.testing.assert_array_equal(_uniform(key, shape), drawn)


def test_layer_words() -> None:
    assert layer_groups("mean", 3) == {"mean": [1, 2, 3]}
    assert layer_groups("mean:0,mean", 2) == {"mean0": [0, 1, 2], "mean": [1, 2]}
    assert layer_groups("groups:2,layer:0", 4) == {
        "groups2.0": [1, 2],
        "groups2.1": [3, 4],
        "layer0": [0],
    }
    assert layer_groups("none", 4) == {}
    for wrong in ("groups:3", "layer:5", "middle", "groups:0", "mean:1", "mean:"):
        with pytest.raises(UserError, match=wrong):
            layer_groups(wrong, 4)


def test_batches_hold_every_row_once_and_keep_to_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(3, 200, 500)
    batches = length_batches(lengths, 1000)
    assert sorted(np.concatenate(batches)) == list(range(500))
    assert all(len(b) == 1 or len(b) * lengths[b].max() <= 1000 for b in batches)
    assert [len(b) for b in length_batches([5000, 3], 1000)] == [1, 1]


def test_stored_tokenizer_has_no_leftovers_of_a_call(tiny_teacher: Teachers) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), attention="none")
    teacher.tokenizer(["a b c"], truncation=True, max_length=4, padding=True)
    stored = json.loads(teacher.files()["tokenizer.json"])
    assert stored["truncation"] is None and stored["padding"] is None


@pytest.fixture(scope="module")
def sparse_teacher(
    tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Tokenizers
) -> Teachers:
    """Return sparse_teacher(family, head, **fields) -> the folder of a random model."""
    root = tmp_path_factory.mktemp("sparse")

    def saved(family: str, head: str, **fields: Any) -> Path:
        tokenizer = make_tokenizer("wordpiece")
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        small["intermediate_size"] = 64
        ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        config = getattr(transformers, f"{family}Config")(
            **ids, initializer_range=0.2, **({} if family == "Funnel" else small), **fields
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            network = getattr(transformers, f"{family}{head}")(config)
        folder = root / f"{family}-{head}"
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return saved


WINDOWED = {"attention_window": [16, 16], "max_position_embeddings": 300}


@pytest.mark.parametrize("head", ["mlm", "classification"])
def test_layers_that_pad_what_they_read(sparse_teacher: Teachers, head: str) -> None:
    """Longformer's padding to its windows leaves values unchanged, also with global attention."""
    kind = {"mlm": "ForMaskedLM", "classification": "ForSequenceClassification"}[head]
    folder = sparse_teacher("Longformer", kind, **WINDOWED)
    teacher = load_teacher(str(folder), head=head, hidden="mean,layer:1", attention="none")
    assert not teacher.one_length
    ids, present = tokens(teacher)
    assert len({*present.sum(axis=1) % 16}) > 1 and present.shape[1] % 16
    got = teacher.run(ids, present)
    plain = getattr(transformers, f"Longformer{kind}").from_pretrained(folder).eval()
    for row, length in enumerate(present.sum(axis=1)):
        one = torch.from_numpy(ids[row : row + 1, :length])
        with torch.no_grad():
            want = plain(input_ids=one.long(), output_hidden_states=True)
        states = [state[0] for state in want.hidden_states]
        own = {name: values[row, :length] for name, values in got.hidden.items()}
        close: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(own["layer1"], states[1], **close)
        torch.testing.assert_close(own["mean"], torch.stack(states[1:]).mean(0), **close)
        assert got.head_input is not None and teacher.decoder is not None
        values = got.head_input[row] if head == "classification" else got.head_input[row, :length]
        logits = torch.cat([each for _, each in teacher.decoder.logits(values.reshape(-1, 32))])
        torch.testing.assert_close(logits, want.logits[0].reshape(logits.shape), **close)


def test_layers_of_other_lengths_than_the_text_are_refused(sparse_teacher: Teachers) -> None:
    def refusal(family: str, head: str, hidden: str, attention: str, **fields: Any) -> str:
        folder = sparse_teacher(family, head, **fields)
        with pytest.raises(UserError) as error:
            load_teacher(str(folder), hidden=hidden, attention=attention)
        return str(error.value)

    line = refusal("Longformer", "ForMaskedLM", "mean", "mean", **WINDOWED)
    assert "the attention maps of layer 1 are not tokens x tokens" in line
    assert line.endswith("use --attention none")
    line = refusal("FNet", "ForMaskedLM", "mean", "mean")
    assert line.endswith(
        "FNetModel returns no attention maps from its layers: use --attention none"
    )
    parts = {"segment_means_seq_len": 64, "num_landmarks": 8}  # reads exactly 64 tokens
    line = refusal("Nystromformer", "ForMaskedLM", "mean", "none", **parts)
    assert "NystromformerForMaskedLM cannot read a batch of texts of 16 tokens" in line
    blocks = {"block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
    line = refusal("Funnel", "ForMaskedLM", "mean", "none", **blocks)
    assert "FunnelModel has no list (ModuleList) of its 2 layers" in line


CAPPED_FIELDS = {"logits_soft_cap": 3.0, "block_types": ["recurrent", "attention"]}
CAPPED = "scales or caps its logits in a way that a store cannot hold"
AHEAD = "attends to later tokens, so its head does not predict the next one"


@pytest.mark.parametrize(
    ("family", "head", "fields", "why"),
    [
        ("RecurrentGemma", "ForCausalLM", CAPPED_FIELDS, CAPPED),
        ("XLNet", "LMHeadModel", {"d_inner": 64, "d_head": 16}, AHEAD),
        ("Bert", "LMHeadModel", {}, AHEAD),
        ("Bert", "LMHeadModel", {"is_decoder": True}, None),
    ],
    ids=["RecurrentGemma", "XLNet", "Bert", "decoder"],
)
def test_causal_heads_that_a_store_cannot_hold_are_refused(
    sparse_teacher: Teachers, family: str, head: str, fields: dict[str, Any], why: str | None
) -> None:
    folder = sparse_teacher(family, head, **fields)
    if why is None:
        assert load_teacher(str(folder), hidden="none", attention="none").head == "causal"
        return
    with pytest.raises(UserError, match=f"{family}{head} {why}.* use --head none$") as error:
        load_teacher(str(folder), hidden="none", attention="none")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["FNet", "ConvBert", "Yoso"])
@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification"])
def test_padding_that_changes_numbers_is_left_out(
    sparse_teacher: Teachers, tmp_path: Path, family: str, kind: str
) -> None:
    """If padding changes values, texts run alone, and equal transformers' states and logits."""
    folder = sparse_teacher(family, kind, **({"hidden_act": "relu"} if family == "FNet" else {}))
    said, corpus = list[str](), tmp_path / "c.txt"
    corpus.write_text("".join(f"{text}\n" for text in SENTENCES[:6]), "utf-8")
    task = kind == "ForSequenceClassification"
    dump(
        dump_options(
            folder,
            corpus,
            tmp_path / "s.zarr",
            attention="none",
            codec="exact",
            logits=None if task else "topk:4",
        ),
        said.append,
    )
    assert any(line.startswith("batches   hold texts of the same length only") for line in said)
    plain = getattr(transformers, f"{family}{kind}").from_pretrained(folder).eval()
    records = list(open_store(tmp_path / "s.zarr"))
    assert len({len(record.token_ids) for record in records}) > 2
    for record in records:
        with torch.no_grad():
            ids = torch.from_numpy(record.token_ids.astype(np.int64))[None]
            want = plain(input_ids=ids, output_hidden_states=True)
        mean = torch.stack(want.hidden_states[1:]).mean(0)[0]
        view = record.views[0]
        np.testing.assert_allclose(view.hidden["mean"], mean, atol=1e-4, rtol=1e-4)
        if task:
            np.testing.assert_allclose(view.class_logits, want.logits[0], atol=1e-4, rtol=1e-4)


def test_models_that_are_no_stack_of_layers_over_pieces_are_refused(
    sparse_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    small: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16}
    config = transformers.T5Config(vocab_size=len(tokenizer), **small)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the encoder of an encoder-decoder \(T5EncoderModel\)"):
        load_teacher(str(tmp_path))
    with pytest.raises(UserError, match="canine model has no vocab_size.* encoder or a decoder"):
        folder = tmp_path / "canine"
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        letters = transformers.CanineConfig(intermediate_size=16, **small)
        transformers.CanineModel(letters).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        load_teacher(str(folder))


def test_bigbird_attends_to_all_tokens_of_what_it_may_read(sparse_teacher: Teachers) -> None:
    """BigBird's window is limited to full attention: sparse attention depends on the batch."""
    folder = sparse_teacher("BigBird", "ForMaskedLM", block_size=16, num_random_blocks=1)
    teacher = load_teacher(str(folder))
    assert teacher.max_length() == 7 * 16
    assert window_length(112, teacher) == window_length(None, teacher) == 112
    with pytest.raises(UserError, match="is sparse for texts of more than 112 tokens"):
        window_length(113, teacher)
    ids, present = tokens(teacher, 3)
    plain = AutoModelForMaskedLM.from_pretrained(
        folder, attn_implementation="eager", attention_type="original_full"
    ).eval()
    with torch.no_grad():
        want = plain(
            input_ids=torch.from_numpy(ids).long(),
            attention_mask=torch.from_numpy(present).long(),
            output_hidden_states=True,
            output_attentions=True,
        )
    got, here = teacher.run(ids, present), torch.from_numpy(present)
    mean = torch.stack(want.hidden_states[1:]).mean(0)
    torch.testing.assert_close(got.hidden["mean"][here], mean[here], atol=1e-4, rtol=1e-4)
    maps = torch.stack(want.attentions).mean(dim=(0, 2))
    torch.testing.assert_close(got.attention["mean"][here], maps[here], atol=1e-4, rtol=1e-4)


def head_and_values(dtype: torch.dtype, seed: int, scale: float) -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(seed)
    decoder = Decoder.of(torch.randn(700, 24, dtype=dtype), torch.randn(700, dtype=dtype))
    return decoder, (scale * torch.randn(53, 24)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 8.0]), chunk=st.integers(1, 60)
)
def test_the_kept_logits(dtype: torch.dtype, seed: int, scale: float, chunk: int) -> None:
    decoder, values = head_and_values(dtype, seed, scale)
    exact = nn.functional.linear(values.double(), decoder.weight.double(), decoder.bias.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "CHUNK_ELEMENTS", 700 * chunk)
        ids, logprobs, rest, log_partition = top_logits(decoder, values, 5).values()
        assert np.abs(log_partitions(decoder, values) - log_partition).max() < 1e-4
    logp = exact.log_softmax(-1)
    assert np.abs(log_partition - exact.logsumexp(-1).numpy()).max() < 1e-4
    kept = logp.gather(1, torch.from_numpy(ids).long())
    assert np.abs(logprobs - kept.numpy()).max() < 1e-4  # whichever of two equal values it is
    assert np.abs(logprobs - logp.topk(5).values.numpy()).max() < 1e-4
    left = logp.scatter(1, torch.from_numpy(ids).long(), -torch.inf).logsumexp(-1).numpy()
    assert np.abs(np.exp(rest) - np.exp(left)).max() < 1e-5


def test_full_products_where_a_factor_has_more_bits() -> None:
    """Float32 states with a bfloat16 head (a bfloat16 teacher run again) use full products."""
    decoder, _ = head_and_values(torch.bfloat16, 0, 1.0)
    values = 8 * torch.randn(53, 24)
    exact = nn.functional.linear(values.double(), decoder.weight.double(), decoder.bias.double())
    assert decoder.rounded
    assert np.abs(log_partitions(decoder, values) - exact.logsumexp(-1).numpy()).max() < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_fused_kernel() -> None:
    """The fused kernel agrees with float64, in its own process: Triton fixes its mode at import."""
    pytest.importorskip("triton")
    words = (sys.executable, "-m", "tests.teacher_dump.teacher.interpreted")
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    assert printed_by(*words, cwd=ROOT, **settings) == "sound\n"


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_head = pytest.importorskip("teachonce.teacher_dump.teacher.fused_head")
    monkeypatch.setattr(fused_head, "PROGRAMS", 2)
    has_fused_kernel, cpu = heads.has_fused_kernel.__wrapped__, torch.device("cpu")
    assert not has_fused_kernel(5, cpu)

    def kernel(change: Callable[..., Any]) -> Callable[..., Any]:
        def best_logits(weight: Any, bias: Any, states: Any, k: int) -> Any:
            (found,) = heads.chunked_logits(Decoder(weight.float(), bias, True), states, k)
            return change(*found)

        return best_logits

    for change, sound in (
        (lambda ids, best, left: (ids, best, left), True),
        (lambda ids, best, left: (ids.roll(1, 0), best, left), False),
        (lambda ids, best, left: (ids[:, :1].expand_as(ids), best, left), False),
        (lambda ids, best, left: (ids, best + 0.1, left), False),
        (lambda ids, best, left: (ids, best, 0.9 * left), False),
    ):
        monkeypatch.setattr(fused_head, "best_logits", kernel(change))
        assert has_fused_kernel(5, cpu) == sound
    monkeypatch.setattr(fused_head, "best_logits", kernel(lambda *found: found))
    assert has_fused_kernel(fused_head.MOST, cpu) and not has_fused_kernel(fused_head.MOST + 1, cpu)
