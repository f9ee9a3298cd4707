"""Operators of GPTs and T5s as rows of a database.

Products are split as in Megatron-LM: algorithm 0 splits the columns of the first of two weights and
the rows of the second, algorithm 1 the other way round. Times of an operator include the all-reduce
of its results, or of the gradient of its input. Dropout is counted as memory traffic with a mask of
one byte for each element, as in Aceso's own models.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._operator_prices import OperatorPrices
from ._write_database import OperatorRow

_INDEX_BYTES = 4
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes of a GPT, or of a T5 if `target_len` is not 0.

    Attributes:
        hidden_size, num_heads, ffn_size, vocab_size, seq_len: as usual.
        max_positions: number of learned positions.
        dtype: dtype of parameters and activations.
        head_size: columns of one head; 0 for `hidden_size / num_heads`.
        target_len: tokens that a T5's decoder predicts; 0 for a GPT.
    """

    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    max_positions: int
    dtype: str
    head_size: int = 0
    target_len: int = 0

    @property
    def algorithms(self) -> tuple[int, ...]:
        """The algorithms of operators; Aceso has only one for T5s."""
        return (0,) if self.target_len else (0, 1)

    @property
    def splits(self) -> int:
        """The number that tensor degrees must divide: that of the heads."""
        return self.num_heads

    def rows(self, prices: OperatorPrices) -> tuple[OperatorRow, ...]:
        """The rows of all distinct operators, in order."""
        tokens = prices.batch * self.seq_len
        encoder = _Side(shape=self, prices=prices, tokens=tokens, length=self.seq_len)
        first = (encoder.embedding("encoder-embedding"), *encoder.layer())
        if not self.target_len:
            last = encoder.final_norm("final-layernorm"), encoder.with_loss("gpt-post-process")
            return first + last
        decoder = _Side(
            shape=self,
            prices=prices,
            tokens=prices.batch * self.target_len,
            length=self.target_len,
            carried=encoder.hidden,
        )
        return (
            *first,
            encoder.final_norm("enc-final-layernorm"),
            decoder.embedding("decoder-embedding"),
            *decoder.decoder_layer(encoder),
            decoder.final_norm("dec-final-layernorm"),
            decoder.with_loss("t5-post-process"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Operators on one stream of tokens: of a GPT, of an encoder, or of a decoder.

    Attributes:
        tokens: tokens of a micro-batch.
        length: tokens of a sample.
        carried: bytes of the encoder's result, which travels along through a decoder.
    """

    shape: TransformerShape
    prices: OperatorPrices
    tokens: int
    length: int
    carried: float = 0.0

    @property
    def hidden(self) -> float:
        """Bytes of the residual stream."""
        return self.tokens * self.shape.hidden_size * self.prices.item

    @property
    def beside(self) -> float:
        """Bytes that travel along beside the arrays of an operator inside a layer."""
        return self.hidden + self.carried

    @property
    def inner(self) -> int:
        """Columns of all heads together."""
        s = self.shape
        return s.head_size * s.num_heads or s.hidden_size

    @property
    def mask(self) -> float:
        """Bytes of a dropout mask, as a multiple of those of the array that it is for."""
        return 1 / self.prices.item

    @property
    def splits(self) -> tuple[int, int]:
        """Numbers of parts into which the inputs and the outputs of the first of two products are
        split.
        """
        t = self.prices.tensor
        return (1, t) if self.prices.algorithm == 0 else (t, 1)

    def embedding(self, name: str) -> OperatorRow:
        """Lookup of tokens, positions and dropout."""
        s, p, hidden = self.shape, self.prices, self.hidden
        table = (s.vocab_size / p.tensor + s.max_positions) * s.hidden_size * p.item
        return p.row(
            name,
            (
                p.traffic((4 + self.mask) * hidden) + p.collective("all-reduce", hidden),
                p.traffic((2 + self.mask) * hidden + hidden + table),
            ),
            (self.carried or self.tokens * _INDEX_BYTES, hidden + self.carried),
            table,
            (1 + self.mask) * hidden,
            (hidden, table + hidden),
        )

    def layer(self) -> tuple[OperatorRow, ...]:
        """A layer of a GPT or of an encoder."""
        return (
            self._norm("enc-1st-layernorm"),
            *self._attention("enc", "", self),
            self._norm("enc-2nd-layernorm"),
            *self._feed_forward("enc"),
        )

    def decoder_layer(self, encoder: _Side) -> tuple[OperatorRow, ...]:
        """A layer of a decoder."""
        return (
            self._norm("dec-1st-layernorm"),
            *self._attention("dec", "-1", self),
            self._norm("dec-2nd-layernorm"),
            *self._attention("dec", "-2", encoder),
            self._norm("dec-3rd-layernorm"),
            *self._feed_forward("dec"),
        )

    def final_norm(self, name: str) -> OperatorRow:
        """The norm after the last layer."""
        return self._norm(name, leaves=self.hidden + self.carried)

    def _norm(self, name: str, leaves: float | None = None) -> OperatorRow:
        hidden = self.hidden
        return self.prices.row(
            name,
            (self.prices.traffic(2 * hidden), self.prices.traffic(4 * hidden)),
            (hidden + self.carried, hidden + self.beside if leaves is None else leaves),
            0.0,
            hidden + 2 * _FLOAT32_BYTES * self.tokens,
            (0.0, 2 * hidden),
        )

    def _attention(self, kind: str, end: str, keys: _Side) -> tuple[OperatorRow, ...]:
        """Attention to the tokens of `keys`, including the dropout after it."""
        s, p, beside = self.shape, self.prices, self.beside
        t, h = p.tensor, s.hidden_size
        heads = p.batch * s.num_heads // t
        per_head = self.inner // s.num_heads
        queries_bytes = self.tokens * self.inner * p.item / t
        keys_bytes = keys.tokens * self.inner * p.item / t
        scores = p.batch * s.num_heads * self.length * keys.length * p.item / t
        around = (scores + keys_bytes + beside,) * 2
        split_in, split_out = self.splits
        prefix = f"{kind}-attention-"
        return (
            self._queries_keys_values(f"{prefix}qkv{end}", keys),
            p.row(
                f"{prefix}score{end}",
                p.products(heads, self.length, keys.length, per_head),
                (queries_bytes + 2 * keys_bytes + beside, around[0]),
                0.0,
                scores,
                (scores, 2 * scores),
            ),
            p.row(
                f"{prefix}softmax{end}",
                (p.traffic(2 * scores), p.traffic(3 * scores)),
                around,
                0.0,
                scores,
                (0.0, 2 * scores),
            ),
            p.row(
                f"{prefix}dropout{end}",
                (p.traffic((2 + self.mask) * scores), p.traffic((2 + self.mask) * scores)),
                around,
                0.0,
                (1 + self.mask) * scores,
                (0.0, 2 * scores),
            ),
            p.row(
                f"{prefix}context{end}",
                p.products(heads, self.length, per_head, keys.length),
                (around[0], queries_bytes + beside),
                0.0,
                queries_bytes,
                (0.0, scores + queries_bytes),
            ),
            self._linear(
                f"{prefix}dense{end}", self.inner, h, split_out, split_in, bias=h * p.item
            ),
            self._dropout(f"{kind}-post-attention-dropout{end}"),
        )

    def _queries_keys_values(self, name: str, keys: _Side) -> OperatorRow:
        h, inner = self.shape.hidden_size, self.inner
        split_in, split_out = self.splits
        if keys is self:
            return self._linear(name, h, 3 * inner, split_in, split_out, bias=0.0)
        # Cross-attention: queries from the decoder's tokens, keys and values from the encoder's.
        own = self._linear(name, h, inner, split_in, split_out, bias=0.0)
        other = keys._linear(name, h, 2 * inner, split_in, split_out, bias=0.0)
        out = self.tokens * inner * self.prices.item + 2 * keys.tokens * inner * self.prices.item
        mib = 2.0**20
        return OperatorRow(
            name=name,
            forward_us=own.forward_us + other.forward_us,
            backward_us=own.backward_us + other.backward_us,
            input_mb=own.input_mb,
            output_mb=(out / split_out + self.beside) / mib,
            weights_mb=own.weights_mb + other.weights_mb,
            activations_mb=own.activations_mb + other.activations_mb,
            forward_working_mb=own.forward_working_mb + other.forward_working_mb,
            backward_working_mb=own.backward_working_mb + other.backward_working_mb,
        )

    def _feed_forward(self, kind: str) -> tuple[OperatorRow, ...]:
        s, p = self.shape, self.prices
        h, f = s.hidden_size, s.ffn_size
        split_in, split_out = self.splits
        wide = self.tokens * f * p.item / split_out
        bias = f * p.item / split_out
        return (
            self._linear(f"{kind}-MLP-GEMM-1", h, f, split_in, split_out, bias=bias),
            p.row(
                f"{kind}-MLP-gelu",
                (p.traffic(2 * wide), p.traffic(3 * wide)),
                (wide + bias + self.beside, wide + self.beside),
                0.0,
                wide,
                (0.0, 2 * wide),
            ),
            self._linear(f"{kind}-MLP-GEMM-2", f, h, split_out, split_in, bias=h * p.item),
            self._dropout(f"{kind}-post-MLP-dropout"),
        )

    def _linear(
        self, name: str, wide_in: int, wide_out: int, split_in: int, split_out: int, *, bias: float
    ) -> OperatorRow:
        """A product with a weight whose rows or columns are split; sums over split rows are
        all-reduced.
        """
        p = self.prices
        into, out = self.tokens * wide_in * p.item, self.tokens * wide_out * p.item
        forward, backward = p.products(1, self.tokens, wide_out // split_out, wide_in // split_in)
        if split_in > 1:
            forward += p.collective("all-reduce", out)
        if split_out > 1:
            backward += p.collective("all-reduce", into)
        weights = wide_in * wide_out * p.item / p.tensor
        return p.row(
            name,
            (forward, backward),
            (into / split_in + self.beside, out / split_out + self.beside + bias),
            weights,
            out / split_out,
            (0.0, weights + into / split_in),
        )

    def _dropout(self, name: str) -> OperatorRow:
        """Dropout, with the bias and the residual added in the same kernel."""
        p, hidden = self.prices, self.hidden
        return p.row(
            name,
            (p.traffic((3 + self.mask) * hidden), p.traffic((2 + self.mask) * hidden)),
            (hidden + self.beside + self.shape.hidden_size * p.item, hidden + self.carried),
            0.0,
            (1 + self.mask) * hidden,
            (0.0, 2 * hidden),
        )

    def with_loss(self, name: str) -> OperatorRow:
        """Logits and the loss, which is computed from them in single precision."""
        s, p = self.shape, self.prices
        logits = self.tokens * s.vocab_size * p.item / p.tensor
        single = logits * _FLOAT32_BYTES / p.item
        forward, backward = p.products(1, self.tokens, s.vocab_size // p.tensor, s.hidden_size)
        forward += p.traffic(logits + 3 * single)
        forward += p.collective("all-reduce", self.tokens * _FLOAT32_BYTES)
        backward += p.traffic(logits + 2 * single) + p.collective("all-reduce", self.hidden)
        return p.row(
            name,
            (forward, backward),
            (self.hidden, 0.0),
            s.vocab_size * s.hidden_size * p.item / p.tensor,
            single,
            (logits, logits),
        )
