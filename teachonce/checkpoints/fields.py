"""Lists the fields of a checkpoint's files, and what Teachonce does with each.

A field is *honoured* by the named library, *refused* with an error unless its value is in
`accepted`, or *harmless*: it does not change the output of a teacher. docs/fields.md shows these
tables; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Treatment = Literal["honoured", "refused", "harmless"]

CONFIG = "config.json"
MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
OLD_LENGTHS = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of LENGTHS in the first releases of sentence-transformers."""
TOKENIZER_SETTINGS = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
ADAPTER = "adapter_config.json"
STATIC = "StaticEmbedding"  # a module of sentence-transformers: averages a table of word vectors

ABSENT: tuple[Any, ...] = (None, False, 0, "", (), [], {})  # values equal to a missing field


@dataclass(frozen=True)
class Fields:
    """Lists fields of one file with the same treatment.

    note: the library that honours them, or why they are refused or harmless.
    accepted: values of a refused field that raise no error.
    remedy: what to do about a refused field.
    of_class: whether the field is honoured if the family's class in transformers has it.
    """

    names: tuple[str, ...]
    treatment: Treatment
    note: str
    accepted: tuple[Any, ...] = ABSENT
    remedy: str = ""
    of_class: bool = False


def honoured(names: str, by: str) -> Fields:
    return Fields(tuple(names.split()), "honoured", by)


def harmless(names: str, why: str) -> Fields:
    return Fields(tuple(names.split()), "harmless", why)


def refused(
    names: str, why: str, remedy: str, accepted: tuple[Any, ...] = ABSENT, of_class: bool = False
) -> Fields:
    return Fields(tuple(names.split()), "refused", why, accepted, remedy, of_class)


OF_FEATURES = honoured(
    "module_input_name module_output_name",
    "Teachonce: `token_embeddings` before the Pooling, `sentence_embedding` after it; else refused",
)
FIELDS: dict[str, tuple[Fields, ...]] = {
    CONFIG: (
        honoured("model_type", "transformers: the family of the network"),
        honoured("architectures", "Teachonce: choose the head with `--head auto`"),
        honoured("id2label num_labels later_label", "Teachonce: names of the labels, by number"),
        honoured(
            "label2id", "Teachonce: refused if it gives the same names other numbers than id2label"
        ),
        honoured(
            "problem_type sentence_transformers sbert_ce_default_activation_function",
            "Teachonce: the kind of a classification head; an unknown problem_type is refused",
        ),
        honoured(
            "score_mean score_deviation",
            "Teachonce: `downstream --task pair` standardises scores with them",
        ),
        honoured("text_pairs", "Teachonce: a classifier of pairs is not run on single texts"),
        honoured(
            "vocab_size hidden_size num_hidden_layers n_layers n_layer n_embd dim d_model emb_dim"
            " embedding_size num_attention_heads n_heads n_head num_key_value_heads num_kv_heads"
            " head_dim d_head intermediate_size hidden_dim n_inner d_inner ffn_dim ffn_hidden_size"
            " input_embedding_size output_embedding_size word_embed_proj_dim num_hidden_groups"
            " inner_group_num type_vocab_size pooler_hidden_size",
            "transformers: sizes",
        ),
        honoured(
            "max_position_embeddings n_positions", "transformers, and Teachonce: the longest window"
        ),
        honoured("pad_token_id", "transformers, and Teachonce: RoBERTa's positions start after it"),
        honoured(
            "hidden_act hidden_activation activation activation_function ff_activation"
            " gelu_activation layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps norm_bias"
            " attention_bias mlp_bias bias use_bias enable_bias decoder_bias classifier_bias"
            " do_layer_norm_before emb_layer_norm_before normalization_type parallel_attn"
            " use_parallel_residual use_qk_norm apply_residual_connection_post_layernorm",
            "transformers: activations and norms of a layer",
        ),
        honoured(
            "rope_theta rope_scaling rope_parameters rotary_value rotary_pct partial_rotary_factor"
            " original_max_position_embeddings alibi relative_attention position_buckets"
            " max_relative_positions position_biased_input pos_att_type share_att_key norm_rel_ebd"
            " conv_kernel_size conv_act relative_attention_num_buckets sinusoidal_pos_embds"
            " sinusoidal_embeddings legacy",
            "transformers: positions",
        ),
        honoured(
            "local_attention global_attn_every_n_layers layer_types sliding_window"
            " use_sliding_window max_window_layers attention_window attention_type block_size"
            " num_random_blocks use_bidirectional_attention is_causal causal attn_type"
            " attn_logit_softcapping query_pre_attn_scalar scale_attn_weights"
            " scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attention_multiplier",
            "transformers: which tokens attend to which, and how much",
        ),
        honoured(
            "embedding_multiplier residual_multiplier rescale_embeddings logit_scale"
            " logits_scaling tie_word_embeddings classifier_pooling classifier_activation"
            " summary_type summary_use_proj summary_activation summary_proj_to_labels token_dropout"
            " pooler_hidden_act",
            "transformers: scales, tied weights and heads",
        ),
        honoured(
            "is_decoder",
            "transformers: each token attends to earlier ones; Teachonce: accepted with"
            " `--head causal` or `none`; a masked-LM head is refused",
        ),
        honoured(
            "auto_map",
            "transformers with `--trust-remote-code`; without it printed as `unread`, or refused if"
            " transformers lacks the class",
        ),
        refused(
            "position_embedding_type",
            "transformers reads this family with absolute positions only",
            "dump with a release of transformers that reads it, or take another checkpoint",
            ("absolute", None, ""),
            of_class=True,
        ),
        refused(
            "pruned_heads",
            "transformers no longer removes heads of attention when it loads a checkpoint",
            "save the checkpoint with all its heads, or take another one",
        ),
        refused(
            "add_cross_attention",
            "its layers attend to states of another encoder, which a dump does not have",
            "take an encoder or a decoder that reads text only",
        ),
        honoured(
            "final_logit_softcapping output_logit_soft_cap",
            "transformers; Teachonce: applied to stored logits, and stored with `--logits head`",
        ),
        honoured(
            "quantization_config",
            "transformers, by the library of the method; refused if transformers lacks the method",
        ),
        harmless(
            "_name_or_path transformers_version dtype torch_dtype finetuning_task"
            " task_specific_params use_cache gradient_checkpointing _commit_hash"
            " tokenizer_class attn_implementation _attn_implementation onnx_export language"
            " languages license model_card directionality prefix revision",
            "metadata and memory settings; `--precision` chooses the dtype",
        ),
        harmless(
            "hidden_dropout_prob attention_probs_dropout_prob hidden_dropout attention_dropout"
            " dropout embedding_dropout mlp_dropout classifier_dropout classifier_dropout_prob"
            " pooler_dropout resid_pdrop embd_pdrop attn_pdrop layerdrop qa_dropout"
            " seq_classif_dropout summary_last_dropout summary_first_dropout initializer_range"
            " initializer_cutoff_factor init_std embed_init_std sparse_prediction"
            " sparse_pred_ignore_index router_aux_loss_coef pretraining_tp",
            "used in training only",
        ),
        harmless(
            "bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_index mask_index"
            " decoder_start_token_id",
            "the tokenizer decides which special tokens a text has",
        ),
        harmless(
            "output_hidden_states output_attentions return_dict torchscript use_return_dict"
            " chunk_size_feed_forward",
            "a dump passes its own values",
        ),
        harmless(
            "max_length min_length do_sample early_stopping num_beams num_beam_groups"
            " diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty"
            " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences"
            " forced_bos_token_id forced_eos_token_id remove_invalid_values"
            " exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
            "used in generation only",
        ),
        harmless(
            "tf_legacy_loss use_bfloat16 cross_attention_hidden_size"
            " is_encoder_decoder deterministic_flash_attn memory_efficient_attention"
            " reference_compile",
            "of older releases, or memory settings; an encoder-decoder is refused by its class",
        ),
    ),
    MODULES: (
        honoured("path", "Teachonce: refused if it leads out of the folder"),
        honoured(
            "type",
            "Teachonce: a Transformer, then Dense and Normalize of tokens, a Pooling, then Dense,"
            " LayerNorm, Normalize and Dropout; or a StaticEmbedding in the place of Transformer"
            " and Pooling. Other modules are refused: Router, CNN, LSTM, WordEmbeddings, BoW,"
            " WordWeights, WeightedLayerPooling, CLIPModel, and modules of other packages",
        ),
        harmless("idx name", "the order in the file is the order of the modules"),
        harmless("kwargs", "extra arguments of encode(); a dump passes none"),
    ),
    "Pooling": (
        honoured(
            "pooling_mode pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens"
            " pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens"
            " pooling_mode_lasttoken",
            "sentence-transformers: the vectors of the modes that are true are concatenated, in the"
            " order of the file",
        ),
        honoured("include_prompt", "sentence-transformers: false leaves the prompt's tokens out"),
        honoured(
            "embedding_dimension word_embedding_dimension", "Teachonce: the encoder's hidden size"
        ),
    ),
    "Dense": (
        honoured(
            "in_features out_features bias activation_function use_residual",
            "sentence-transformers; an unknown activation is refused",
        ),
        OF_FEATURES,
    ),
    "Normalize": (OF_FEATURES,),
    "LayerNorm": (honoured("dimension", "sentence-transformers"),),
    "Dropout": (harmless("dropout", "used in training only"),),
    LENGTHS: (
        honoured(
            "max_seq_length",
            "Teachonce: the longest text in tokens, by default up to 256 in a dump",
        ),
        honoured("do_lower_case", "Teachonce: a Lowercase normalizer before the tokenizer's"),
        refused(
            "transformer_task",
            "its output is not the encoder's last hidden state",
            "give a model of dense vectors",
            ("feature-extraction", None),  # of a CrossEncoder sequence-classification
        ),
        refused(
            "query_length document_length query_expansion",
            "queries and documents are truncated to different lengths",
            "remove the field, and give --max-length",
        ),
        honoured(
            "tokenizer_args.model_max_length processor_kwargs.model_max_length"
            " processing_kwargs.text.max_length",
            "Teachonce: the longest text in tokens",
        ),
        harmless(
            "model_args.torch_dtype model_args.dtype model_args.attn_implementation"
            " model_args.add_pooling_layer model_args.trust_remote_code model_kwargs.torch_dtype"
            " model_kwargs.dtype model_kwargs.attn_implementation model_kwargs.add_pooling_layer"
            " model_kwargs.trust_remote_code config_args.trust_remote_code"
            " config_kwargs.trust_remote_code tokenizer_args.trust_remote_code"
            " tokenizer_args.padding_side processor_kwargs.trust_remote_code"
            " processor_kwargs.padding_side processing_kwargs.text.padding"
            " processing_kwargs.text.truncation",
            "loading and batch layout; only `--trust-remote-code` runs code",
        ),
        refused(
            "model_args model_kwargs config_args config_kwargs tokenizer_args processor_kwargs"
            " processing_kwargs",
            "all other arguments change how the checkpoint is read",
            "write them into config.json or tokenizer_config.json, and remove the field",
        ),
        honoured(
            "modality_config module_output_name",
            "Teachonce: `last_hidden_state` of a text as `token_embeddings`; chat messages and"
            " other outputs are refused",
        ),
        harmless("unpad_inputs", "batch layout"),
    ),
    SETTINGS: (
        honoured(
            "prompts default_prompt_name",
            "Teachonce: `--prompt`, or the default; a default prompt of a CrossEncoder is refused",
        ),
        honoured(
            "truncate_dim", "Teachonce: vectors are truncated to this size, after all modules"
        ),
        honoured(
            "similarity_fn_name",
            "Teachonce: copied to the student; euclidean and manhattan need vectors of length 1",
        ),
        refused(
            "model_type",
            "its output is not one dense vector for each text",
            "give a SentenceTransformer, or dump a CrossEncoder with --head score",
            ("SentenceTransformer", None),
        ),
        honoured(
            "activation_fn",
            "Teachonce: what a student's CrossEncoder applies to its logits; several outputs with a"
            " Sigmoid are several labels. Refused if it is not a class of torch.nn",
        ),
        harmless("keep_in_fp32_modules", "`--precision` chooses the dtype"),
        harmless("__version__ requirements", "metadata"),
    ),
    TOKENIZER_SETTINGS: (
        honoured("model_max_length", "Teachonce: the longest window"),
        honoured(
            "tokenizer_class do_lower_case strip_accents tokenize_chinese_chars add_prefix_space"
            " add_bos_token add_eos_token added_tokens_decoder additional_special_tokens"
            " extra_special_tokens split_special_tokens legacy do_basic_tokenize never_split"
            " trim_offsets unk_token bos_token eos_token sep_token pad_token cls_token mask_token"
            " sp_model_kwargs keep_accents remove_space do_remove_space from_slow vocab_file"
            " merges_file add_dummy_prefix_space use_default_system_prompt auto_map",
            "transformers; refused if the loaded tokenizer gives other ids than its tokenizer.json",
        ),
        honoured(
            "truncation_side",
            "Teachonce: the end at which a text with a single label or vector is cut to its window",
        ),
        harmless(
            "padding_side padding pad_to_multiple_of pad_token_type_id",
            "padding is masked, or left out where it changes numbers",
        ),
        harmless(
            "model_input_names",
            "padding is masked; token_type_ids are passed where the model uses them",
        ),
        harmless(
            "clean_up_tokenization_spaces spaces_between_special_tokens", "used in decoding only"
        ),
        honoured(
            "chat_template",
            "Teachonce: stored; applied with `--messages`; other texts are read as they are",
        ),
        harmless("response_schema", "texts are read as they are"),
        harmless("max_length stride truncation truncation_strategy", "`--max-length` decides"),
        harmless(
            "backend is_local local_files_only name_or_path tokenizer_file special_tokens_map_file"
            " _commit_hash processor_class",
            "metadata of loading",
        ),
    ),
    TOKENIZER: (
        honoured("model pre_tokenizer normalizer post_processor added_tokens", "tokenizers"),
        honoured(
            "truncation",
            "Teachonce: the longest text of a StaticEmbedding; switched off for a transformer,"
            " which has other fields for it",
        ),
        harmless("padding", "switched off"),
        harmless("version decoder", "used in decoding only"),
    ),
    ADAPTER: (
        refused(
            "base_model_name_or_path peft_type",
            "its weights are an adapter of another model",
            "merge it (model.merge_and_unload() of peft) and save the result",
        ),
    ),
}
"""Fields by file; modules of sentence-transformers by their kind, whose file is config.json."""
