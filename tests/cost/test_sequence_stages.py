"""What stages hold whose sequence is split: XLA works on `[sequence, batch, features]` there."""

import dataclasses
import functools

import pytest

import aliquot as aq
from aliquot.cost import _stages
from aliquot.planners import Megatron
from aliquot.zoo import build

SEQ_LEN, HIDDEN, BFLOAT16 = 128, 64, 2
SIZES = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 128,
    "seq_len": SEQ_LEN,
    "vocab_size": 256,
}


@functools.lru_cache
def stages_of(batch, spec="4xH100", sequence=True):
    """The priced stages of the plan of a small Llama in two micro-batches, by position."""
    cluster = aq.Cluster.preset(spec)
    work = build("llama-7b", batch, overrides=SIZES, dtype="bf16", scan=True, device=cluster.device)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        price = _stages.predict_stages

        def noting(stages, *arguments, **options):
            answer = price(stages, *arguments, **options)
            found.append((stages, answer))
            return answer

        patch.setattr("aliquot.planners._solve_stages.predict_stages", noting)
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=Megatron(tensor=2, pipeline=2, sequence=sequence),
            num_micro_batches=2,
        )
    return found[-1]


def test_several_examples_are_held_in_two_orders():
    stages, _ = stages_of(4)
    for stage in stages:
        gathered_bytes = 2 * SEQ_LEN * HIDDEN * BFLOAT16
        assert stage.sequence.shards == 2
        assert stage.sequence.gathered_bytes == 2 * gathered_bytes
        assert stage.sequence.stacked_bytes > 0


@pytest.mark.parametrize(
    ("batch", "spec", "sequence", "shards"),
    [
        (2, "4xH100", True, 2),
        (4, "4xv5e", True, 1),
        (4, "4xH100", False, 1),
        # Each data rank has one example.
        (4, "8xH100", True, 2),
    ],
)
def test_one_example_or_another_order_takes_nothing(batch, spec, sequence, shards):
    stages, _ = stages_of(batch, spec, sequence)
    for stage in stages:
        assert stage.sequence == _stages.SequenceCosts(shards=shards)


def test_what_is_held_counts_at_the_peak_of_each_stage():
    stages, answer = stages_of(4)
    for stage, casts_once, predicted in zip(stages, answer.casts_once, answer.stages, strict=True):
        costs = stage.costs
        working = stage.casts_working_bytes if casts_once else costs.working_bytes
        held = stage.sequence.gathered_bytes + stage.sequence.stacked_bytes
        wanted = held + working + costs.recomputed_bytes + costs.stacked_bytes
        assert predicted.memory_bytes["working memory"] == pytest.approx(wanted)


def test_a_stage_that_recomputes_keeps_its_part_of_the_sequence_and_stores_no_stacks():
    stages, _ = stages_of(4)
    again = dataclasses.replace(stages[1], recompute="stage")
    assert _stages._forward_s(again) < _stages._forward_s(stages[1]) == stages[1].costs.forward_s
    entering = [4.0 * SEQ_LEN * HIDDEN]

    def costs(stage):
        return _stages._stage_costs(
            [stages[0], stage],
            [0.0],
            [0.0],
            entering,
            overlaps_transfers=True,
            casts_once=[False, False],
        )

    assert costs(again).in_flight_bytes[1] == entering[0] / 2
    spared = costs(stages[1]).working_bytes[1] + stages[1].costs.in_flight_bytes
    assert costs(again).working_bytes[1] == spared - stages[1].sequence.stacked_bytes
