"""Settings of pytorch/torchtitan, torchtitan/models/llama3/config_registry.py, llama3_70b."""


def llama3_70b():
    """Fields that are set."""
    model_spec = model_registry('70B')
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=65536,
            max_context_length=8192,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=8,
        ),
        activation_checkpoint=FullAC.Config(),
    )
