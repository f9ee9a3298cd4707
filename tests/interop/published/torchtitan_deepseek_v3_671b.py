"""Settings of pytorch/torchtitan, torchtitan/models/deepseek_v3/config_registry.py, deepseek_v3_671b."""


def deepseek_v3_671b():
    """Fields that are set."""
    model_spec = model_registry('671B')
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=16384,
            max_context_length=4096,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_schedule='Interleaved1F1B',
            expert_parallel_degree=2,
        ),
        compile=CompileConfig(
            enable=True,
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )
