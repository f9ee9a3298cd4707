"""Operations of a step as the benchmarks of Alpa count them, for throughput beside the published
one.
"""

from __future__ import annotations

from ..zoo import ModelConfig, MoEConfig
from ._suite import Case


def operations(case: Case) -> float:
    """Floating-point operations of a step as its suite counts them: with recomputation where the
    case recomputes, the vocabulary's product once, and, for experts, dispatch and combination.
    Convolutions are counted without recomputation.

    >>> from ._suite import alpa_suites
    >>> f"{operations(alpa_suites()['gpt.perf_test_auto'].cases[3]):.3g}"
    '2.33e+16'
    """
    config = case.config
    if not isinstance(config, ModelConfig | MoEConfig):
        flops = config.flops_per_example * case.global_batch
        return flops / 3 if case.forward_only else flops
    tokens, hidden = case.global_batch * config.seq_len, config.hidden_size
    passes = 1 if case.forward_only else 4 if case.recompute else 3
    if isinstance(config, ModelConfig):
        layers = 24 * passes * hidden**2 * config.num_layers * (1 + config.seq_len / (6 * hidden))
        return tokens * (layers + 6 * hidden * config.vocab_size)
    # Every second layer has experts, of which each token visits two.
    wide = config.ffn_size // hidden
    attention = 8 * hidden**2 + 4 * config.seq_len * hidden
    plain = attention + 4 * wide * hidden**2
    experts = attention + 8 * wide * hidden**2 + 2 * hidden * config.num_experts
    experts += (4 + 8 * hidden) * config.group_size
    layers = config.num_layers / 2 * (plain + experts)
    return tokens * (passes * layers + 6 * hidden * config.vocab_size)
