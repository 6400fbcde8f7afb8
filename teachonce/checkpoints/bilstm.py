"""BiLSTM students as transformers models. Importing this module registers them with the Auto
classes.

Word embeddings, one or more bidirectional LSTMs, and a head: the students of Mukherjee & Awadallah
2019 ("Distilling BERT into Simple Neural Networks with Unlabeled Transfer Data") and 2020
("XtremeDistil"). Shape letters: B batch, S tokens, E embedding size, H hidden size of one
direction, V vocabulary, C labels.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from teachonce.support.errors import UserError


class BiLstmConfig(PreTrainedConfig):
    """Holds the sizes of a BiLSTM: `embedding_size` E, and `lstm_size` H of each direction.

    `dropout` applies to the embeddings, between layers and before the head; `recurrent_dropout` to
    the state that an LSTM passes from one token to the next. If `projection_size` P is above 0, the
    input of the heads is GELU(W h + b) [P] for a state h (Mukherjee & Awadallah 2020, eq. 5), else
    h itself. `classifier_pooling` makes one state of a text's states: `max` takes the largest value
    of each channel, `last` the last state of each direction.

    Word vectors are initialised with length 1.
    """

    model_type = "bilstm"
    # config.json holds these only if they differ from these defaults.
    recurrent_dropout = 0.0
    projection_size = 0
    classifier_pooling = "max"

    def __init__(
        self,
        vocab_size: int = 30522,
        embedding_size: int = 300,
        lstm_size: int = 600,
        num_hidden_layers: int = 1,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        pad_token_id: int | None = 0,
        initializer_range: float | None = None,
        tie_word_embeddings: bool = True,
        projection_size: int = 0,
        classifier_pooling: str = "max",
        **common: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.embedding_size, self.lstm_size = embedding_size, lstm_size
        self.num_hidden_layers = num_hidden_layers
        self.dropout = dropout
        if recurrent_dropout:
            self.recurrent_dropout = recurrent_dropout
        if projection_size:
            self.projection_size = projection_size
        if classifier_pooling != "max":
            self.classifier_pooling = classifier_pooling
        self.pad_token_id = pad_token_id
        # E numbers with this deviation have a length of 1. With BERT's deviation of 0.02, an LSTM
        # without norms had learnt only the frequencies of words after hundreds of steps.
        self.initializer_range = initializer_range or embedding_size**-0.5
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**common)

    @property
    def hidden_size(self) -> int:
        """Return the hidden size of both directions together, 2H."""
        return 2 * self.lstm_size

    @property
    def head_width(self) -> int:
        """Return the size of the heads' input."""
        return self.projection_size or self.hidden_size


class BiLstmPreTrainedModel(PreTrainedModel):
    """Declares, for all BiLSTM models, their config class and the attributes that hold the encoder
    and its word embeddings."""

    config_class = BiLstmConfig
    base_model_prefix = "bilstm"
    _input_embed_layer = "embeddings"


class BiLstmModel(BiLstmPreTrainedModel):
    """Computes states by word embeddings and bidirectional LSTMs, without a head."""

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(
            config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id
        )
        widths = [config.embedding_size] + [config.hidden_size] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(
            BiLstmLayer(width, config.lstm_size, config.recurrent_dropout) for width in widths
        )
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutput:
        """Return the last states [B,S,2H]; the hidden states are the embeddings [B,S,E], then each
        layer's output.

        Tokens that `attention_mask` [B,S] masks, at any position, are not read, and their outputs
        are zero. `token_type_ids` are accepted and ignored, because many tokenizers return them.

        Raises UserError if attention maps are requested, ValueError for a row without a token.
        """
        if output_attentions:
            raise UserError(
                "a BiLSTM has no attention maps; leave --loss attention out, or dump with"
                " --attention none"
            )
        present = present_tokens(input_ids, attention_mask)
        orders = reading_orders(present)
        states = [self.dropout(self.embeddings(input_ids))]
        for number, layer in enumerate(self.layers):
            # The embeddings had their dropout above. Dropout applies to the input of the next layer
            # but not to the returned states, because losses compare these with the teacher's.
            read = layer(self.dropout(states[-1]) if number else states[-1], orders)
            states.append(read.masked_fill(~present[:, :, None], 0))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
        )


def present_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the attention mask as bool [B,S]; all true if it is None."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask.bool()


def max_over(states: Tensor, present: Tensor) -> Tensor:
    """Return the maximum [B,D] of each channel of states [B,S,D] over the present tokens [B,S]
    (Mukherjee & Awadallah 2019, section 3.1)."""
    # Padding has states of 0, which would be the maximum of a channel whose states are all
    # negative.
    return states.masked_fill(~present[:, :, None], -torch.inf).amax(dim=1)


def last_of(states: Tensor, present: Tensor) -> Tensor:
    """Return the last state of each direction [B,2H]: the forward state of the last token, and the
    backward state of the first. `states` is [B,S,2H]; `present` bool [B,S] is False on padding."""
    forwards, backwards = states.chunk(2, dim=2)
    rows = torch.arange(len(states), device=states.device)
    # `argmax` returns the first of equal numbers: the last present token in a flipped row (`end`),
    # the first present token in a row that is not flipped.
    end = present.shape[1] - 1 - present.int().flip(1).argmax(dim=1)
    return torch.cat([forwards[rows, end], backwards[rows, present.int().argmax(dim=1)]], dim=1)


POOLINGS = {"max": max_over, "last": last_of}


def reading_orders(present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of each row's tokens in the order in which an LSTM reads them: [B,S] for
    left to right, and [B,S] for right to left. Masked tokens come last.

    present: bool [B,S], False for masked tokens. Raises ValueError for a row without a token.
    """
    # Such a row would be pooled to -inf by `max`, and to a masked token's state by `last`.
    if not bool(present.any(dim=1).all()):
        row = int(present.any(dim=1).int().argmin())
        raise ValueError(f"row {row} of the batch has no token that is present")
    size = present.shape[1]
    positions = torch.arange(size, device=present.device).expand_as(present)
    # `size` is above every key, so masked tokens come last. There they change no state of a present
    # token, as an LSTM reads forward only.
    left, right = (p.masked_fill(~present, size).argsort(dim=1) for p in (positions, -positions))
    return left, right


class BiLstmLayer(nn.Module):
    """Runs an LSTM in each direction, over the present tokens of a row."""

    # Two LSTMs of one direction each: oneDNN runs these with padding, but no packed sequences.
    # An epoch takes 0.7 of the time that it takes with packed sequences.

    def __init__(self, width: int, lstm_size: int, recurrent_dropout: float = 0.0) -> None:
        super().__init__()
        self.recurrent_dropout = recurrent_dropout
        self.left_to_right = nn.LSTM(width, lstm_size, batch_first=True)
        self.right_to_left = nn.LSTM(width, lstm_size, batch_first=True)

    def forward(self, states: Tensor, orders: tuple[Tensor, Tensor]) -> Tensor:
        """Compute states [B,S,2H] from states [B,S,D]; undefined at masked tokens."""
        outputs = []
        for lstm, order in zip((self.left_to_right, self.right_to_left), orders, strict=True):
            index = order[:, :, None]
            ordered = states.gather(1, index.expand(-1, -1, states.shape[2]))
            # nn.LSTM has no dropout of its recurrent state, so a loop in Python replaces it.
            if self.training and self.recurrent_dropout:
                read = lstm_with_dropout(lstm, ordered, self.recurrent_dropout)
            else:
                read = _read(lstm, ordered)
            outputs.append(torch.zeros_like(read).scatter(1, index.expand_as(read), read))
        return torch.cat(outputs, dim=2)


def _read(lstm: nn.LSTM, inputs: Tensor) -> Tensor:
    """Run an LSTM. Raises UserError if the processor cannot run it in the precision of autocast."""
    try:
        states, _ = lstm(inputs)
    except RuntimeError as error:
        # oneDNN's message. Without "descriptor" it means that memory is exhausted.
        refused = "could not create a primitive descriptor" in str(error)
        if not refused or _precision(lstm) != torch.bfloat16:
            raise
        raise UserError(
            "this processor has no instructions for an LSTM in bfloat16 (AVX-512 or AMX); give"
            " --precision fp32"
        ) from error
    return cast(Tensor, states)


def _precision(lstm: nn.LSTM) -> torch.dtype:
    """Return the type in which an LSTM computes on a CPU."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return next(lstm.parameters()).dtype


def lstm_with_dropout(lstm: nn.LSTM, inputs: Tensor, share: float) -> Tensor:
    """Run an LSTM over inputs [B,S,D] to states [B,S,H], with dropout of the recurrent state. The
    same channels of a row are dropped at every token.

    Gal & Ghahramani 2016, "A Theoretically Grounded Application of Dropout in Recurrent Neural
    Networks", equation 7; the `recurrent_dropout` of Keras.
    """
    ((of_input, of_state, *biases),) = lstm.all_weights
    state = cell = inputs.new_zeros(len(inputs), lstm.hidden_size)
    mask = functional.dropout(torch.ones_like(state), share)
    # For all tokens at once: only the product with the state must wait for the token before.
    input_gates = functional.linear(inputs, of_input, biases[0] + biases[1])
    states = []
    for now in input_gates.unbind(1):
        gates = now + functional.linear(state * mask, of_state)
        enter, forget, new, show = gates.chunk(4, dim=1)  # in the order of nn.LSTM's weights
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = show.sigmoid() * cell.tanh()
        states.append(state)
    return torch.stack(states, dim=1)


class _WithHead(BiLstmPreTrainedModel):
    """Runs a BiLSTM with a head: `logits` computes the head's output from the last states, and
    transformers chooses the loss by the class name."""

    output: ClassVar[Any]

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__(config)
        self.bilstm = BiLstmModel(config)
        self.dropout = nn.Dropout(config.dropout)
        if config.projection_size:
            self.projection = nn.Linear(config.hidden_size, config.projection_size)

    def pooled(self, states: Tensor, present: Tensor) -> Tensor:
        """Pool states [B,S,2H] to the input [B,2H] of the classifier."""
        return POOLINGS[self.config.classifier_pooling](states, present)

    def projected(self, states: Tensor) -> Tensor:
        """Return GELU(W h + b) [...,P] of states [...,2H]; without a projection, return the
        states."""
        if not self.config.projection_size:
            return states
        return functional.gelu(self.projection(states))

    def logits(self, states: Tensor, present: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        """Return the logits and, if `labels` are given, the loss of transformers for this kind of
        head."""
        read = self.bilstm(
            input_ids,
            attention_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.logits(read.last_hidden_state, present_tokens(input_ids, attention_mask))
        loss = None
        if labels is not None:
            # The losses of masked LM, classifier and tagger each use some of these arguments.
            loss = self.loss_function(
                labels=labels,
                logits=logits,
                pooled_logits=logits,
                vocab_size=self.config.vocab_size,
                config=self.config,
            )
        return self.output(loss=loss, logits=logits, hidden_states=read.hidden_states)


class BiLstmForMaskedLM(_WithHead):
    """Predicts masked tokens: a transform to the embedding size, as in BERT, then the word
    embeddings as decoder."""

    output = MaskedLMOutput
    # transformers 5 expects a mapping from each tied weight to its source, 4 expected a list.
    _tied_weights_keys = {"decoder.weight": "bilstm.embeddings.weight"}

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__(config)
        self.transform = nn.Sequential(
            nn.Linear(config.head_width, config.embedding_size),
            nn.GELU(),
            nn.LayerNorm(config.embedding_size),
        )
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings  # type: ignore[assignment]

    def logits(self, states: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the logits [...,V] of states [...,2H]."""
        logits: Tensor = self.decoder(self.transform(self.dropout(self.projected(states))))
        return logits


class _Classifier(_WithHead):
    """Maps the states of a BiLSTM linearly to the labels."""

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.head_width, len(config.id2label or ()))
        self.post_init()  # type: ignore[no-untyped-call]


class BiLstmForSequenceClassification(_Classifier):
    """Classifies texts by a linear map. Its input is the largest value of each channel over the
    tokens (Mukherjee & Awadallah 2019, section 3.1), or the last states (the RNN of 2019; 2020,
    section 6.6)."""

    output = SequenceClassifierOutput

    def logits(self, states: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the logits [B,C] of states [B,S,2H] and which tokens are present [B,S]."""
        assert present is not None
        pooled = self.projected(self.pooled(states, present))
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


class BiLstmForTokenClassification(_Classifier):
    """Tags tokens: a linear map of each token's state (Mukherjee & Awadallah 2020, section 3.1)."""

    output = TokenClassifierOutput

    def logits(self, states: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the logits [...,C] of states [...,2H]."""
        logits: Tensor = self.classifier(self.dropout(self.projected(states)))
        return logits


AutoConfig.register(BiLstmConfig.model_type, BiLstmConfig, exist_ok=True)
for auto, own in (
    (AutoModel, BiLstmModel),
    (AutoModelForMaskedLM, BiLstmForMaskedLM),
    (AutoModelForSequenceClassification, BiLstmForSequenceClassification),
    (AutoModelForTokenClassification, BiLstmForTokenClassification),
):
    auto.register(BiLstmConfig, own, exist_ok=True)
